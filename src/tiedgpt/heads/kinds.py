"""The heads: labels, tags, choices, spans and features on the states of one body."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED, cross_entropy
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads.head import Head
from tiedgpt.heads.padding import checked_lengths, is_token, last_state

DROPOUT = 0.1
"""transformers' dropout before a head where config.json does not give one."""
LANGUAGE_WEIGHT = 0.5
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_proj_to_labels": True,
    "summary_activation": None,
    "summary_last_dropout": 0.0,
}
"""transformers' keys that shape the logit of a choice, with the one value that is supported."""


class _Classifier(Head):
    """A head whose outputs are named labels; raises `UserError` for names that are not distinct."""

    def __init__(self, gpt: GPT, labels: Sequence[str]) -> None:
        super().__init__(gpt)
        names = tuple(labels) if isinstance(labels, Iterable) else ()
        strings = not isinstance(labels, str) and all(isinstance(name, str) for name in names)
        if not names or not strings or len(set(names)) < len(names):
            raise UserError(f"labels must be a list of different names, got {labels!r}")
        self.labels = names

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Forward's arguments and labels -> the mean cross-entropy of labels that are not -100."""
        if len(self.labels) < 2:
            raise UserError(
                f"one label ({self.labels[0]!r}) has no loss", hint="give two or more labels"
            )
        *inputs, labels = batch
        return (cross_entropy(self(*inputs), labels),)

    def _config_keys(self) -> dict[str, Any]:
        return {
            "id2label": {str(number): name for number, name in enumerate(self.labels)},
            "label2id": {name: number for number, name in enumerate(self.labels)},
        }

    @classmethod
    def _options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        problem = config.get("problem_type")
        if problem not in (None, "single_label_classification"):
            raise UserError(
                f"problem_type={problem!r} in config.json is not supported: tiedgpt predicts one "
                "label of several (single_label_classification)"
            )
        numbers = [str(number) for number in range(n_outputs)]
        names = config.get("id2label")
        if names is None:
            names = {number: f"LABEL_{number}" for number in numbers}
        if not isinstance(names, dict) or set(names) != set(numbers):
            raise CorruptInputError(
                f"id2label in config.json must name one label for each of the {n_outputs} rows of "
                f"{cls.own[0]}"
            )
        return {"labels": [names[number] for number in numbers]}


class SequenceClassifier(_Classifier):
    """One label for a sequence: a linear layer without bias on the last token's state.

    Radford et al. 2018, eq. 3: P(y | x_1..x_m) = softmax(h_m W_y).
    """

    architecture = "ForSequenceClassification"
    own = ("score.weight",)

    def __init__(self, gpt: GPT, labels: Sequence[str]) -> None:
        super().__init__(gpt, labels)
        self.score = self._linear(len(self.labels), bias=False)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> logits (B, N), one for each label."""
        h = self.gpt.body(ids)
        return self.score(last_state(h, checked_lengths(ids, lengths)))


class TokenClassifier(_Classifier):
    """One label for every token, which sees itself and the tokens before it."""

    architecture = "ForTokenClassification"
    own = ("classifier.weight", "classifier.bias")

    def __init__(self, gpt: GPT, labels: Sequence[str], *, dropout: float = DROPOUT) -> None:
        super().__init__(gpt, labels)
        self.dropout = nn.Dropout(dropout)
        self.classifier = self._linear(len(self.labels), bias=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, T) -> logits (B, T, N), one for each label."""
        return self.classifier(self.dropout(self.gpt.body(ids)))

    def _config_keys(self) -> dict[str, Any]:
        return super()._config_keys() | {"classifier_dropout": self.dropout.p}

    @classmethod
    def _options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        dropout = _dropout(config, "classifier_dropout", "hidden_dropout")
        return super()._options_from(config, n_outputs) | {"dropout": dropout}


class MultipleChoice(Head):
    """Which of several continuations is right: the "double heads" of Radford et al. 2018.

    A logit for each choice is read at its last token, beside the prediction of tokens (section 3.2:
    L_3 = L_choice + lambda L_language with lambda = 0.5).
    """

    architecture = "DoubleHeadsModel"
    predicts_tokens = True
    own = ("multiple_choice_head.summary.weight", "multiple_choice_head.summary.bias")

    def __init__(self, gpt: GPT, *, dropout: float = DROPOUT) -> None:
        super().__init__(gpt)
        parts = OrderedDict(dropout=nn.Dropout(dropout), summary=self._linear(1, bias=True))
        self.multiple_choice_head = nn.Sequential(parts)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, C, T), lengths (B, C) -> logits (B, C).

        A length of 0 means that there is no such choice; its logit is -inf.
        """
        return self._choices(self.gpt.body(ids.flatten(0, 1)), ids, lengths)

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, C, T), lengths (B, C), targets (B, C, T), answers (B,) -> both terms of L_3.

        `targets[b, c, t]` is the id that follows `ids[b, c, t]`, or -100 where the language term
        does not count it, for example in wrong choices.
        """
        ids, lengths, targets, answers = batch
        h = self.gpt.body(ids.flatten(0, 1))  # (B * C, T, D)
        targets = targets.flatten()
        counted = targets != IGNORED
        language = self.gpt.head_loss(h.flatten(0, 1)[counted], targets[counted])
        choice = cross_entropy(self._choices(h, ids, lengths), answers)
        return LANGUAGE_WEIGHT * language, choice

    def _choices(self, h: Tensor, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """States (B * C, T, D), ids (B, C, T), lengths (B, C) -> logits (B, C)."""
        flat = None if lengths is None else lengths.flatten()
        flat = checked_lengths(ids.flatten(0, 1), flat, least=0)
        logits = self.multiple_choice_head(last_state(h, flat))[:, 0]
        return logits.masked_fill(flat == 0, float("-inf")).view(ids.shape[:2])

    def _config_keys(self) -> dict[str, Any]:
        return SUMMARY | {
            "summary_first_dropout": self.multiple_choice_head.get_submodule("dropout").p,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }

    @classmethod
    def _options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        for key, value in SUMMARY.items():
            if (config.get(key, value) or None) != (value or None):
                raise UserError(
                    f"{key}={config[key]!r} in config.json is not supported, only {value!r} is"
                )
        return {"dropout": _dropout(config, "summary_first_dropout")}


class SpanFinder(Head):
    """First and last token of an answer in a text. The text sees the question before it."""

    architecture = "ForQuestionAnswering"
    own = ("qa_outputs.weight", "qa_outputs.bias")

    def __init__(self, gpt: GPT) -> None:
        super().__init__(gpt)
        self.qa_outputs = self._linear(2, bias=True)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> logits (B, T, 2) of starting and ending; padding is -inf."""
        logits = self.qa_outputs(self.gpt.body(ids))
        padding = ~is_token(ids, checked_lengths(ids, lengths))
        return logits.masked_fill(padding[..., None], float("-inf"))

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, T), lengths (B,), spans (B, 2) -> the mean cross-entropy of first and last token.

        A span of -100 is not counted.
        """
        ids, lengths, spans = batch
        return (cross_entropy(self(ids, lengths).transpose(1, 2), spans),)


def best_spans(logits: Tensor) -> Tensor:
    """Logits (B, T, 2) -> (B, 2): first and last token of the best span, first <= last."""
    starts, ends = logits.float().unbind(-1)
    # The best start up to each end, then the best end: O(T) instead of O(T^2) pairs.
    best, where = torch.cummax(starts, dim=1)
    last = (best + ends).argmax(dim=1)
    first = where.gather(1, last[:, None])[:, 0]
    return torch.stack((first, last), dim=1)


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
        h, lengths = self.gpt.body(ids), checked_lengths(ids, lengths)
        if self.pooling == "last":
            return last_state(h, lengths)
        return (h * is_token(ids, lengths)[..., None]).sum(1) / lengths[:, None]

    def _config_keys(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    @classmethod
    def _options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        return {"pooling": config.get("pooling", "last")}


def _dropout(config: Mapping[str, Any], *keys: str) -> float:
    """Return the first dropout that a config.json gives under one of these keys."""
    key = next((key for key in keys if config.get(key) is not None), None)
    value = DROPOUT if key is None else config[key]
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise CorruptInputError(f"{key} must be a probability in [0, 1), got {value!r}")
    return float(value)
