"""Classification of texts: a label for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.heads import SequenceClassifier
from tiedgpt.heads.inputs import read_text
from tiedgpt.train.objectives.labelled import Example, Labelled, Row, read_label


class Classify(Labelled):
    """{"text": "...", "label": "name or number"}; of a long text the beginning is taken."""

    fields = '{"text": ..., "label": ...}'
    head_class = SequenceClassifier
    pipeline = "text-classification"
    use = 'head.labels[head(*pad([tokenizer.encode("a text")])).argmax()]'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return text and label."""
        text = read_text(record, "text")
        return Example((text,), labels=(read_label(record.get("label")),))

    def encode(self, example: Example, context: int) -> Row:
        """Return the text's ids and the label's number, ()."""
        ids = self.tokenizer.encode(example.texts[0])
        answer = np.array(self.numbers[example.labels[0]])
        return Row((ids[:context],), answer, cut=len(ids) > context)

    def answer(self, head: SequenceClassifier, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the label that scores highest, and the text."""
        return f"{head.labels[int(head(*batch[:2]).argmax())]}: {example.texts[0]}"
