"""Labelled lines: how often the answers of a head are right, and their loss.

lines = read_lines(documents(["test.jsonl"]), head)
print(summarize(head, list(score_lines(head, tokenizer, lines))).to_json())
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tiedgpt.data.corpus import FileCorpus
from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import Interval, share_interval
from tiedgpt.files import parse_records
from tiedgpt.heads import AnsweringHead
from tiedgpt.heads.inputs import format_fields
from tiedgpt.heads.predictions import read_outputs
from tiedgpt.text import Tokenizer


@dataclass(frozen=True)
class LabelledLine:
    """A labelled line."""

    record: dict[str, Any] = field(repr=False)
    """Its fields, as `predict` reads them."""
    expected: tuple[Any, ...]
    """Names of its labels, the index of the right choice, or the numbers of a regression."""


@dataclass(frozen=True)
class AnswerScore:
    """A head's answer to one line."""

    loss: float
    expected: tuple[Any, ...]
    predicted: tuple[Any, ...]
    is_cut: bool
    """Whether text was omitted because it is longer than the context."""


class LabelCounts(NamedTuple):
    """Numbers of lines with a label."""

    label: str
    examples: int
    """Lines whose label it is."""
    predicted: int
    """Lines for which it is predicted."""
    right: int
    """Lines of both."""


@dataclass(frozen=True)
class LabelsScore:
    """Accuracy and loss on several lines."""

    scores: Sequence[AnswerScore]

    @property
    def n_right(self) -> int:
        """Number of lines whose labels are all predicted, and no other."""
        return sum(set(score.expected) == set(score.predicted) for score in self.scores)

    @property
    def accuracy(self) -> float:
        """The share of `n_right`."""
        return self.n_right / len(self.scores)

    @property
    def interval(self) -> Interval:
        """95 % interval of `accuracy`."""
        return share_interval(self.n_right, len(self.scores))

    @property
    def commonest(self) -> tuple[str, float]:
        """The labels that most lines have, and the accuracy of always predicting them."""
        counts = Counter(score.expected for score in self.scores)
        labels, n = counts.most_common(1)[0]
        return ", ".join(map(str, labels)) or "none", n / len(self.scores)

    def by_label(self) -> list[LabelCounts]:
        """Return the counts of each label that a line has or an answer names, commonest first."""
        expected = Counter(label for score in self.scores for label in score.expected)
        predicted = Counter(label for score in self.scores for label in score.predicted)
        right = Counter(x for score in self.scores for x in {*score.expected} & {*score.predicted})
        labels = sorted(expected | predicted, key=lambda label: (-expected[label], label))
        return [LabelCounts(str(x), expected[x], predicted[x], right[x]) for x in labels]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "accuracy": self.accuracy,
            "accuracy_interval": self.interval,
            "commonest": self.commonest[1],
            **_describe(self.scores),
            "by_label": [counts._asdict() for counts in self.by_label()],
        }


@dataclass(frozen=True)
class NumbersScore:
    """Errors of a regression on several lines."""

    scores: Sequence[AnswerScore]

    @property
    def absolute_error(self) -> float:
        """Mean of |predicted - expected|."""
        pairs = (zip(s.predicted, s.expected, strict=True) for s in self.scores)
        errors = [abs(predicted - expected) for pair in pairs for predicted, expected in pair]
        return math.fsum(errors) / len(errors)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data; the loss is the mean squared error."""
        return {"absolute_error": self.absolute_error, **_describe(self.scores)}


def _describe(scores: Sequence[AnswerScore]) -> dict[str, Any]:
    return {
        "loss": math.fsum(score.loss for score in scores) / len(scores),
        "examples": len(scores),
        "texts_cut": sum(score.is_cut for score in scores),
    }


def summarize(head: AnsweringHead, scores: Sequence[AnswerScore]) -> LabelsScore | NumbersScore:
    """Return the score of a head over several lines."""
    return NumbersScore(scores) if head.predicts_numbers else LabelsScore(scores)


def read_lines(corpus: FileCorpus, head: AnsweringHead) -> list[LabelledLine]:
    """Return the labelled lines in files of records for a head.

    A line is {"text": .., "label": ..} for a classifier: a name, or an index; a list of names where
    several may hold at once. For a regression it is {"text": .., "number": 3.5}, or a list of
    numbers, in the field `label`, too. For a choice it is
    {"text": .., "choices": [..], "answer": index}. The corpus counts fields that are not read.
    Raises `CorruptInputError` with the line's number, and `UserError` for a head whose scores have
    no labels, or without a line.
    """
    fields = format_fields({**head.record_fields, **head.expected_fields()})

    def parse(record: dict[str, Any], _: str) -> LabelledLine:
        head.read_texts(record)  # raises the error of a wrong one
        field_name, expected = head.read_expected(record)
        corpus.remarks.unread_fields.count(record, (*head.record_fields, field_name))
        return LabelledLine(record, expected)

    lines = list(parse_records(corpus.records(fields), fields, parse))
    if not lines:
        names = ", ".join(corpus.paths)
        raise UserError(f"{names} has no lines", hint=f"give .jsonl, each line {fields}")
    return lines


def score_lines(
    head: AnsweringHead, tokenizer: Tokenizer, lines: Sequence[LabelledLine]
) -> Iterator[AnswerScore]:
    """Yield the score of a head, in eval mode, on each line."""
    records = (line.record for line in lines)
    for line, (logits, is_cut) in zip(lines, read_outputs(head, tokenizer, records), strict=True):
        targets = torch.tensor(head.targets(line.expected), device=logits.device)
        loss = head.criterion(logits[None], targets)
        yield AnswerScore(float(loss), line.expected, head.decide(logits), is_cut)
