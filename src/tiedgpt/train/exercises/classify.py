"""A label for a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, SequenceClassifier
from tiedgpt.text import Tokenizer
from tiedgpt.train.exercises.exercise import (
    Exercise,
    Prepared,
    Right,
    label_name,
    text_in,
)


@dataclass(frozen=True)
class LabelledText:
    """A text and its label."""

    text: str
    label: str


class Classify(Exercise):
    """{"text": "...", "label": "name or number"}; of a long text the beginning is taken."""

    fields = '{"text": ..., "label": ...}'
    head_class = SequenceClassifier
    use = 'head.labels[head(*pad([tokenizer.encode("a text")])).argmax()]'
    measure = "accuracy"

    def parse(self, record: Mapping[str, Any]) -> LabelledText:
        """Return text and label."""
        return LabelledText(text_in(record, "text"), label_name(record.get("label")))

    def texts(self, example: LabelledText) -> Iterable[str]:
        """Return the text."""
        return (example.text,)

    def labels(self, example: LabelledText) -> Iterable[str]:
        """Return the label."""
        return (example.label,)

    def prepare(
        self, example: LabelledText, tokenizer: Tokenizer, context: int, numbers: Mapping[str, int]
    ) -> Prepared:
        """Return the text's ids and the label's number, ()."""
        ids = tokenizer.encode(example.text)
        answer = np.array(numbers[example.label])
        return Prepared((ids[:context],), answer, cut=len(ids) > context)

    def head(self, gpt: GPT, labels: Sequence[str]) -> Head:
        """Return a sequence classifier."""
        return SequenceClassifier(gpt, labels)

    def judge(self, head: Head, batch: Sequence[Tensor]) -> Right:
        """Count labels that score highest."""
        ids, lengths, labels = batch
        right = head(ids, lengths).argmax(-1) == labels
        return Right(int(right.sum()), len(labels))

    def show(
        self, head: Head, example: LabelledText, prepared: Prepared, tokenizer: Tokenizer
    ) -> str:
        """Return the label that scores highest, and the text."""
        assert isinstance(head, SequenceClassifier)
        (scores,) = head(torch.tensor(prepared.rows, device=head.score.weight.device))
        said = head.labels[int(scores.argmax())]
        verdict = "rightly" if said == example.label else f"not {example.label}"
        return f"{said} ({verdict}): {example.text}"
