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

from tiedgpt.core.loss import cross_entropy
from tiedgpt.data.corpus import FileCorpus
from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import Interval, share_interval
from tiedgpt.files import list_some, parse_records
from tiedgpt.heads import MultipleChoice, SequenceClassifier
from tiedgpt.heads.inputs import is_number, read_answer, read_field, read_label, read_text
from tiedgpt.heads.predictions import read_outputs
from tiedgpt.text import Tokenizer

THRESHOLD = 0.5
"""Probability from which a label is predicted where several may hold at once."""
AnsweringHead = SequenceClassifier | MultipleChoice


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
    return NumbersScore(scores) if _predicts_numbers(head) else LabelsScore(scores)


def read_lines(corpus: FileCorpus, head: AnsweringHead) -> list[LabelledLine]:
    """Return the labelled lines in files of records for a head.

    A line is {"text": .., "label": ..} for a classifier: a name, or an index; a list of names where
    several may hold at once. For a regression it is {"text": .., "number": 3.5}, or a list of
    numbers, in the field `label`, too. For a choice it is
    {"text": .., "choices": [..], "answer": index}. The corpus counts fields that are not read.
    Raises `CorruptInputError` with the line's number, and `UserError` for a head whose scores have
    no labels, or without a line.
    """
    fields = '{"text": .., "label": ..}'
    if isinstance(head, MultipleChoice):
        fields = '{"text": .., "choices": [..], "answer": index}'
    elif head.problem_type is None and len(head.labels) == 1:
        raise UserError(
            "the head has one output and no problem_type, so there is no label to compare with",
            hint='write "problem_type": "regression" in config.json if labels are numbers',
        )
    elif _predicts_numbers(head):
        fields = '{"text": .., "number": ..}'

    def parse(record: dict[str, Any], _: str) -> LabelledLine:
        choice = ("choices", "answer")
        answer = choice if isinstance(head, MultipleChoice) else (_field(head, record),)
        corpus.remarks.unread_fields.count(record, ("text", *answer))
        return LabelledLine(record, _expected(head, record))

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
        expected, labels = line.expected, getattr(head, "labels", ())
        if isinstance(head, MultipleChoice):
            loss = cross_entropy(logits[None], torch.tensor(expected, device=logits.device))
        elif _predicts_numbers(head):
            loss = head.criterion(logits[None], logits.new_tensor(expected))
        elif head.problem_type == "multi_label_classification":
            targets = [float(label in expected) for label in labels]
            loss = head.criterion(logits[None], logits.new_tensor(targets))
        else:
            number = torch.tensor([labels.index(expected[0])], device=logits.device)
            loss = head.criterion(logits[None], number)
        yield AnswerScore(float(loss), expected, _predicted(head, logits), is_cut)


def _predicts_numbers(head: AnsweringHead) -> bool:
    return isinstance(head, SequenceClassifier) and head.problem_type == "regression"


def _field(head: SequenceClassifier, record: dict[str, Any]) -> str:
    """Return the name of the field with the expected answer of a classifier."""
    names = ("number", "label") if _predicts_numbers(head) else ("label",)
    return next((name for name in names if record.get(name) is not None), names[0])


def _predicted(head: AnsweringHead, logits: torch.Tensor) -> tuple[Any, ...]:
    """Return the answer that the logits (N,) mean, in the form of `LabelledLine.expected`."""
    if isinstance(head, MultipleChoice):
        return (int(logits.argmax()),)
    if _predicts_numbers(head):
        return tuple(logits.tolist())
    if head.problem_type == "multi_label_classification":
        scores = zip(head.labels, head.scores(logits).tolist(), strict=True)
        return tuple(label for label, score in scores if score >= THRESHOLD)
    return (head.labels[int(logits.argmax())],)


def _expected(head: AnsweringHead, record: dict[str, Any]) -> tuple[Any, ...]:
    """Return the labels of a line; raise `UserError` for a wrong one."""
    if isinstance(head, MultipleChoice):
        return (read_answer(record)[1],)
    read_text(record, "text")
    field_name = _field(head, record)
    label = read_field(record, field_name)
    if _predicts_numbers(head):
        numbers: list[Any] = label if isinstance(label, list) else [label]
        if not all(map(is_number, numbers)) or len(numbers) != len(head.labels):
            expected = "a number" if len(head.labels) == 1 else f"{len(head.labels)} numbers"
            raise UserError(f"the {field_name} {label!r} is not {expected}")
        return tuple(map(float, numbers))
    if head.problem_type == "multi_label_classification":
        several = label if isinstance(label, list) else [label]
        return tuple(dict.fromkeys(_name(head, {"label": one}) for one in several))
    return (_name(head, record),)


def _name(head: SequenceClassifier, record: dict[str, Any]) -> str:
    """Return the head's name of the label in a record."""
    label = read_label(record)
    for name in (label, f"LABEL_{label}"):  # transformers' name of a label that has none
        if name in head.labels:
            return name
    raise UserError(f"the model has no label {label!r}, it has {list_some(head.labels, 5)}")
