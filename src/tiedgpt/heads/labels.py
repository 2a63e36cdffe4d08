"""Labels: one for a sequence, read at its last token, or one for every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads.head import Head, cross_entropy
from tiedgpt.heads.padding import at_last, whole

DROPOUT = 0.1
"""What transformers has where a config says nothing."""


class SequenceClassifier(Head):
    """A label for a sequence: a product without bias of the last token's state.

    Radford et al. 2018, eq. 3: P(y | x_1..x_m) = softmax(h_m W_y).
    """

    architecture = "ForSequenceClassification"
    own = ("score.weight",)

    def __init__(self, gpt: GPT, labels: Sequence[str]) -> None:
        super().__init__(gpt)
        self.labels = checked_labels(labels)
        self.score = self.linear(len(self.labels), bias=False)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> (B, N): a score for every label."""
        h = self.gpt.body(ids)
        return self.score(at_last(h, whole(ids, lengths)))

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Take ids (B, T), lengths (B,), labels (B,): the mean cross-entropy of the labels.

        A label of -100 is not counted.
        """
        ids, lengths, labels = batch
        _require_a_choice(self.labels)
        return (cross_entropy(self(ids, lengths), labels),)

    def description(self) -> dict[str, Any]:
        """Name the labels as transformers does."""
        return _named(self.labels)

    @classmethod
    def options_from(
        cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Return the labels."""
        return {"labels": _names_from(config, shapes["score.weight"])}


class TokenClassifier(Head):
    """A label for every token, from what it and those before it say."""

    architecture = "ForTokenClassification"
    own = ("classifier.weight", "classifier.bias")

    def __init__(self, gpt: GPT, labels: Sequence[str], *, dropout: float = DROPOUT) -> None:
        super().__init__(gpt)
        self.labels = checked_labels(labels)
        self.dropout = nn.Dropout(dropout)
        self.classifier = self.linear(len(self.labels), bias=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, T) -> (B, T, N); what stands at padding means nothing."""
        return self.classifier(self.dropout(self.gpt.body(ids)))

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Take ids (B, T), labels (B, T): mean cross-entropy of the labels that are not -100."""
        ids, labels = batch
        _require_a_choice(self.labels)
        return (cross_entropy(self(ids), labels),)

    def description(self) -> dict[str, Any]:
        """Name the labels as transformers does, and the dropout before the product."""
        return _named(self.labels) | {"classifier_dropout": self.dropout.p}

    @classmethod
    def options_from(
        cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Return labels and dropout."""
        given = [config.get(key) for key in ("classifier_dropout", "hidden_dropout")]
        dropout = next((value for value in given if value is not None), DROPOUT)
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise CorruptInputError(f"classifier_dropout={dropout!r} is no probability in [0, 1)")
        return {"labels": _names_from(config, shapes["classifier.weight"]), "dropout": dropout}


def checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of labels; `UserError` unless they are strings, and different ones."""
    names = tuple(labels)
    if isinstance(labels, str) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"labels={labels!r}: give a list of names, one for each label")
    if len(set(names)) < len(names):
        raise UserError(f"labels={labels!r}: two labels have the same name")
    return names


def _require_a_choice(labels: tuple[str, ...]) -> None:
    if len(labels) < 2:
        raise UserError(f"one label ({labels[0]!r}) leaves nothing to choose: there is no loss")


def _named(labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
    }


def _names_from(config: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the labels' names; LABEL_0 .. where the file has none."""
    problem = config.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise UserError(
            f"the model's config has problem_type={problem!r}: one label of several is chosen here"
        )
    n_labels = shape[0] if shape else 0
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{number}" for number in range(n_labels))
    if not isinstance(names, dict) or set(names) != {str(number) for number in range(n_labels)}:
        raise CorruptInputError(
            f"id2label in the model's config does not name labels 0 to {n_labels - 1}, of which "
            "the head has scores"
        )
    return tuple(names[str(number)] for number in range(n_labels))
