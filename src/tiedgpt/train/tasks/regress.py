"""A number for each text, by least squares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from tiedgpt.heads import SequenceClassifier, pad
from tiedgpt.heads.inputs import read_number, read_text
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.tasks.examples import LabelData, LabelledExample, LabelledRow
from tiedgpt.train.tasks.labelled import Labelled
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Score


@dataclass(frozen=True)
class NumberScore(Score):
    """The score of a regression on held-out examples; the loss is the mean squared error."""

    rmse: float
    """Root mean squared error, in the unit of the numbers."""


class Regress(Labelled):
    """{"text": "...", "number": 3.5}; a long text is cut to its beginning."""

    fields = '{"text": ..., "number": 3.5}'
    read_fields = ("text", "number")
    head_class = SequenceClassifier
    input_example = '"a text"'
    use = 'head(*pad([tokenizer.encode_document("a text")])).item()'

    @staticmethod
    @override
    def parse(record: Mapping[str, Any]) -> LabelledExample:
        """Return the example with its text and number."""
        return LabelledExample((read_text(record, "text"),), number=read_number(record))

    @override
    def head_options(self, data: LabelData) -> dict[str, Any]:
        return {"labels": ["number"], "problem_type": "regression"}

    @override
    def collate(self, rows: Sequence[LabelledRow]) -> Arrays:
        """Return ids (B, T), lengths (B,), numbers (B,)."""
        ids, lengths = pad([row.ids[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.float32)

    @override
    def score(self, data: Data, sums: Sequence[float]) -> NumberScore:
        """Return the mean squared error and its root."""
        loss = super().score(data, sums).nats
        return NumberScore(loss, math.sqrt(loss))

    @override
    def answer(
        self, head: SequenceClassifier, example: LabelledExample, batch: Sequence[Tensor]
    ) -> str:
        """Return the predicted and the right number, and the text."""
        return f"{head(*batch[:2]).item():.4g} for {example.number:.4g}: {example.texts[0]}"

    @override
    def baseline(self, data: LabelData) -> str:
        """Return the error of the mean of the training numbers."""
        mean = math.fsum(row.answer for row in data.train) / len(data.train)
        errors = [row.answer - mean for row in data.validation]
        rmse = math.hypot(*errors) / math.sqrt(len(errors))
        return f"always {mean:.4g}, the training mean, has an rmse of {rmse:.4f}"
