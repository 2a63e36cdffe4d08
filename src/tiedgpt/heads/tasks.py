"""The heads: a label for a sequence, the choice between continuations, and features."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import list_some
from tiedgpt.heads.head import AnsweringHead, Head, take_tensors
from tiedgpt.heads.inputs import (
    check_lengths,
    is_number,
    last_state,
    pad,
    read_answer,
    read_choices,
    read_field,
    read_label,
)

CHOICE_DROPOUT = 0.1
"""Default dropout before the choice head, as in transformers."""
LANGUAGE_WEIGHT = 0.5
"""Weight of the language loss in `MultipleChoice`: lambda of Radford et al. 2018."""
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_proj_to_labels": True,
    "summary_activation": None,
    "summary_last_dropout": 0.0,
}
"""transformers' keys that shape the logit of a choice, with the only supported values."""
THRESHOLD = 0.5
"""Probability from which a label is predicted where several may hold at once."""
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
"""Values of `problem_type` in transformers: the meaning of a classifier's outputs."""


class SequenceClassifier(AnsweringHead):
    """One label for a sequence: a linear layer without bias on the last token's state.

    Radford et al. 2018, eq. 3: P(y | x_1..x_m) = softmax(h_m W_y). `labels` are distinct names.
    `problem_type` is transformers' ("regression", "single_label_classification" or
    "multi_label_classification"). None: the number of labels decides, as there.
    """

    architecture = "ForSequenceClassification"
    head_tensors = ("score.weight",)

    def __init__(self, gpt: GPT, labels: Sequence[str], *, problem_type: str | None = None) -> None:
        super().__init__(gpt)
        if problem_type not in (None, *PROBLEM_TYPES):
            raise UserError(
                f"must be one of {', '.join(PROBLEM_TYPES)}, got {problem_type!r}",
                option="problem_type",
            )
        self.problem_type = problem_type
        names = tuple(labels) if isinstance(labels, Iterable) else ()
        strings = not isinstance(labels, str) and all(isinstance(name, str) for name in names)
        if not names or not strings or len(set(names)) < len(names):
            raise UserError(f"labels must be a list of different names, got {labels!r}")
        self.labels, self.predicts_numbers = names, problem_type == "regression"
        self.score = self._linear(len(names), bias=False)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> logits (B, N), one for each label."""
        h = self.gpt.body(ids)
        return self.score(last_state(h, check_lengths(ids, lengths)))

    def scores(self, logits: Tensor) -> Tensor:
        """Logits (..., N) -> scores (..., N), as transformers' text-classification pipeline.

        The numbers themselves for a regression, the sigmoid of each for several labels at once or
        for a single output, and otherwise the softmax.
        """
        if self.predicts_numbers:
            return logits
        if self.problem_type == "multi_label_classification" or len(self.labels) == 1:
            return logits.sigmoid()
        return logits.softmax(-1)

    @override
    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, T), lengths (B,), labels -> the mean loss, as transformers' class.

        Labels (B,) have the cross-entropy, where -100 is not counted. A regression, or a single
        output, has the mean squared error of numbers (B, N), or (B,) for N = 1. Several labels at
        once have the binary cross-entropy of 0 and 1 (B, N).
        """
        ids, lengths, labels = take_tensors(self, batch, "ids, lengths, labels")
        return (self.criterion(self(ids, lengths), labels),)

    @override
    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        problem, n_labels = self.problem_type, len(self.labels)
        is_squared = self.predicts_numbers or (problem is None and n_labels == 1)
        if not is_squared and problem != "multi_label_classification":
            if n_labels == 1:
                raise UserError(
                    f"one label ({self.labels[0]!r}) has no loss", hint="give two or more labels"
                )
            return super().criterion(logits, targets)
        if targets.numel() != logits.numel():
            raise UserError(
                f"labels must have the shape of the logits {tuple(logits.shape)}, got "
                f"{tuple(targets.shape)}"
            )
        logits, targets = logits.float(), targets.float().view_as(logits)
        if is_squared:
            return F.mse_loss(logits, targets)
        return F.binary_cross_entropy_with_logits(logits, targets)

    @override
    def answer(self, logits: Tensor) -> dict[str, Any]:
        by_label = dict(zip(self.labels, self.scores(logits).tolist(), strict=True))
        if self.predicts_numbers:
            return {"predicted": by_label if len(by_label) > 1 else by_label[self.labels[0]]}
        label = max(by_label, key=by_label.__getitem__)
        return {"predicted": label, "probability": by_label[label], "probabilities": by_label}

    @override
    def describe(self, record: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
        predicted = answer["predicted"]
        if self.predicts_numbers:
            numbers = predicted if isinstance(predicted, dict) else {"": predicted}
            words = [f"{name} {value:.4g}".lstrip() for name, value in numbers.items()]
        else:
            likely = {predicted: answer["probability"]}
            if self.problem_type == "multi_label_classification":
                likely |= {x: p for x, p in answer["probabilities"].items() if p >= THRESHOLD}
            words = [f"{name}  {probability:.2f}" for name, probability in likely.items()]
        return f"{', '.join(words)}  {record['text']}"

    @override
    def expected_fields(self) -> Mapping[str, str]:
        if self.problem_type is None and len(self.labels) == 1:
            raise UserError(
                "the head has one output and no problem_type, so there is no label to compare with",
                hint='write "problem_type": "regression" in config.json if labels are numbers',
            )
        return {"number" if self.predicts_numbers else "label": ".."}

    @override
    def read_expected(self, record: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
        names = ("number", "label") if self.predicts_numbers else ("label",)
        field = next((name for name in names if record.get(name) is not None), names[0])
        value = read_field(record, field)
        values = value if isinstance(value, list) else [value]
        if self.predicts_numbers:
            if not all(map(is_number, values)) or len(values) != len(self.labels):
                expected = "a number" if len(self.labels) == 1 else f"{len(self.labels)} numbers"
                raise UserError(f"the {field} {value!r} is not {expected}")
            return field, tuple(map(float, values))
        if self.problem_type != "multi_label_classification":
            values = [value]
        return field, tuple(dict.fromkeys(map(self._find_label, values)))

    def _find_label(self, value: Any) -> str:
        """Return the head's name of a label in a record."""
        label = read_label({"label": value})
        for name in (label, f"LABEL_{label}"):  # transformers' name of a label that has none
            if name in self.labels:
                return name
        raise UserError(f"the model has no label {label!r}, it has {list_some(self.labels, 5)}")

    @override
    def decide(self, logits: Tensor) -> tuple[Any, ...]:
        if self.problem_type != "multi_label_classification":
            return super().decide(logits)
        scores = zip(self.labels, self.scores(logits).tolist(), strict=True)
        return tuple(label for label, score in scores if score >= THRESHOLD)

    @override
    def targets(self, expected: tuple[Any, ...]) -> Sequence[float]:
        if self.problem_type == "multi_label_classification":
            return [float(label in expected) for label in self.labels]
        return expected if self.predicts_numbers else [self.labels.index(expected[0])]

    @override
    def config_entries(self) -> dict[str, Any]:
        problem = {} if self.problem_type is None else {"problem_type": self.problem_type}
        return problem | {
            "id2label": {str(number): name for number, name in enumerate(self.labels)},
            "label2id": {name: number for number, name in enumerate(self.labels)},
        }

    @classmethod
    @override
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        numbers = [str(number) for number in range(n_outputs)]
        names = config.get("id2label")
        if names is None:
            names = {number: f"LABEL_{number}" for number in numbers}
        if not isinstance(names, dict) or set(names) != set(numbers):
            raise CorruptInputError(
                f"id2label in config.json must name one label for each of the {n_outputs} rows of "
                f"{cls.head_tensors[0]}"
            )
        labels = [names[number] for number in numbers]
        return {"labels": labels, "problem_type": config.get("problem_type")}


class MultipleChoice(AnsweringHead):
    """The right one of several continuations: the "double heads" of Radford et al. 2018.

    A logit for each choice is read at its last token, beside the prediction of tokens (section 3.2:
    L_3 = L_choice + lambda L_language with lambda = 0.5).
    """

    architecture = "DoubleHeadsModel"
    predicts_tokens = keeps_end = True
    record_fields: ClassVar[Mapping[str, str]] = {"text": "..", "choices": "[..]"}
    head_tensors = ("multiple_choice_head.summary.weight", "multiple_choice_head.summary.bias")

    def __init__(self, gpt: GPT, *, dropout: float = CHOICE_DROPOUT) -> None:
        super().__init__(gpt)
        layers = OrderedDict(dropout=nn.Dropout(dropout), summary=self._linear(1, bias=True))
        self.multiple_choice_head = nn.Sequential(layers)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, C, T), lengths (B, C) -> logits (B, C).

        A choice of length 0 is absent; its logit is -inf.
        """
        return self._choices(self.gpt.body(ids.flatten(0, 1)), ids, lengths)

    @override
    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, C, T), lengths (B, C), targets (B, C, T), answers (B,) -> both terms of L_3.

        `targets[b, c, t]` is the id that follows `ids[b, c, t]`, or -100 where the language term
        does not count it, for example in wrong choices.
        """
        ids, lengths, targets, answers = take_tensors(self, batch, "ids, lengths, targets, answers")
        h = self.gpt.body(ids.flatten(0, 1))  # (B * C, T, D)
        targets = targets.flatten()
        counted = targets != IGNORED
        language = self.gpt.head_loss(h.flatten(0, 1)[counted], targets[counted])
        choice = self.criterion(self._choices(h, ids, lengths), answers)
        return LANGUAGE_WEIGHT * language, choice

    @override
    def read_texts(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        return read_choices(record)

    @override
    def compute_logits(self, examples: Sequence[Sequence[list[int]]]) -> Iterable[Tensor]:
        padded = [pad(choices, device=self.gpt.wte.weight.device) for choices in examples]
        return [self(ids[None], lengths[None])[0] for ids, lengths in padded]

    @override
    def answer(self, logits: Tensor) -> dict[str, Any]:
        probabilities = logits.softmax(-1)
        best = int(probabilities.argmax())
        return {
            "predicted": best,
            "probability": float(probabilities[best]),
            "probabilities": probabilities.tolist(),
        }

    @override
    def describe(self, record: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
        return f"{record['choices'][answer['predicted']]}  {answer['probability']:.2f}"

    @override
    def expected_fields(self) -> Mapping[str, str]:
        return {"answer": "index"}

    @override
    def read_expected(self, record: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
        return "answer", (read_answer(record)[1],)

    def _choices(self, h: Tensor, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """States (B * C, T, D), ids (B, C, T), lengths (B, C) -> logits (B, C)."""
        flat = None if lengths is None else lengths.flatten()
        flat = check_lengths(ids.flatten(0, 1), flat, minimum=0)
        logits = self.multiple_choice_head(last_state(h, flat))[:, 0]
        return logits.masked_fill(flat == 0, float("-inf")).view(ids.shape[:2])

    @override
    def config_entries(self) -> dict[str, Any]:
        return SUMMARY | {
            "summary_first_dropout": self.multiple_choice_head.get_submodule("dropout").p,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }

    @classmethod
    @override
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        for key, value in SUMMARY.items():
            if (config.get(key, value) or None) != (value or None):
                raise UserError(
                    f"{key}={config[key]!r} in config.json is not supported, only {value!r} is"
                )
        dropout = config.get("summary_first_dropout")
        dropout = CHOICE_DROPOUT if dropout is None else dropout
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise CorruptInputError(
                f"summary_first_dropout must be a probability in [0, 1), got {dropout!r}"
            )
        return {"dropout": float(dropout)}


class FeatureExtractor(Head):
    """A sequence as one vector: the body's last state, or the mean of all its states."""

    architecture = "Model"

    def __init__(self, gpt: GPT, *, pooling: Literal["last", "mean"] = "last") -> None:
        super().__init__(gpt)
        if pooling not in ("last", "mean"):
            raise UserError(f"pooling must be 'last' or 'mean', got {pooling!r}")
        self.pooling = pooling

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> (B, D)."""
        h, lengths = self.gpt.body(ids), check_lengths(ids, lengths)
        if self.pooling == "last":
            return last_state(h, lengths)
        is_token = torch.arange(ids.shape[-1], device=ids.device) < lengths[:, None]  # (B, T)
        return (h * is_token[..., None]).sum(1) / lengths[:, None]

    @override
    def config_entries(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    @classmethod
    @override
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        return {"pooling": config.get("pooling", "last")}
