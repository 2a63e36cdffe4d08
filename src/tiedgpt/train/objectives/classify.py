"""Classification of texts: one label for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.errors import UserError
from tiedgpt.heads import SequenceClassifier, pad
from tiedgpt.heads.inputs import read_text
from tiedgpt.train.objective import Arrays
from tiedgpt.train.objectives.labelled import Example, Labelled, Row


class Classify(Labelled):
    """{"text": "...", "label": "name or number"}; a long text is cut to its beginning."""

    fields = '{"text": ..., "label": ...}'
    head_class = SequenceClassifier
    use = 'head.labels[head(*pad([tokenizer.encode("a text")])).argmax()]'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the example with its text and label; a label may be a number."""
        text, label = read_text(record, "text"), record.get("label")
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise UserError(f"the label {label!r} is neither a name nor a whole number")
        return Example((text,), labels=(str(label),))

    def encode(self, example: Example, context: int) -> Row:
        """Return the text's ids and the label's number."""
        ids = self.tokenizer.encode(example.texts[0])
        number = self.numbers[example.labels[0]]
        return Row((ids[:context],), number, cut=len(ids) > context)

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return ids (B, T), lengths (B,), labels (B,)."""
        ids, lengths = pad([row.ids[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.int64)

    def answer(self, head: SequenceClassifier, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the most likely label, and the text."""
        return f"{head.labels[int(head(*batch[:2]).argmax())]}: {example.texts[0]}"
