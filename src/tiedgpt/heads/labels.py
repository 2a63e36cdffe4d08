"""Classifiers: one label for a sequence, read at its last token, or one for every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads.head import DROPOUT, Head, cross_entropy, dropout_from
from tiedgpt.heads.padding import checked_lengths, last_state


class _Classifier(Head):
    """A head whose outputs are named labels; raises `UserError` for names that are not distinct."""

    def __init__(self, gpt: GPT, labels: Sequence[str]) -> None:
        super().__init__(gpt)
        names = tuple(labels)
        strings = not isinstance(labels, str) and all(isinstance(name, str) for name in names)
        if not names or not strings or len(set(names)) < len(names):
            raise UserError(f"labels must be a list of different names, got {labels!r}")
        self.labels = names

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Forward's arguments and labels -> the mean cross-entropy of labels that are not -100."""
        if len(self.labels) < 2:
            raise UserError(f"one label ({self.labels[0]!r}) has no loss: give two or more labels")
        *inputs, labels = batch
        return (cross_entropy(self(*inputs), labels),)

    def config_keys(self) -> dict[str, Any]:
        """Return the labels' names as transformers writes them."""
        return {
            "id2label": {str(number): name for number, name in enumerate(self.labels)},
            "label2id": {name: number for number, name in enumerate(self.labels)},
        }

    @classmethod
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        """Return the labels' names; LABEL_0, LABEL_1, ... where the file has none."""
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
                f"id2label in config.json must name labels 0 to {n_outputs - 1}, one for each row "
                f"of {cls.own[0]}"
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
        self.score = self.linear(len(self.labels), bias=False)

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
        self.classifier = self.linear(len(self.labels), bias=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, T) -> logits (B, T, N), one for each label."""
        return self.classifier(self.dropout(self.gpt.body(ids)))

    def config_keys(self) -> dict[str, Any]:
        """Return the labels' names and the dropout."""
        return super().config_keys() | {"classifier_dropout": self.dropout.p}

    @classmethod
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        """Return labels and dropout."""
        dropout = dropout_from(config, "classifier_dropout", "hidden_dropout")
        return super().options_from(config, n_outputs) | {"dropout": dropout}
