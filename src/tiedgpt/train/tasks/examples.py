"""Labelled examples: lines of .jsonl to examples, and examples to ids with their answer."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from tiedgpt.data import documents
from tiedgpt.data.records import UnreadFields
from tiedgpt.data.remarks import note_special_tokens, special_token_finder
from tiedgpt.errors import UserError
from tiedgpt.files import format_count, parse_records
from tiedgpt.heads import Head
from tiedgpt.text import Tokenizer
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.tasks.rows import Data, Rows, Sources, example_data

EXAMPLES_PER_HELD_OUT = 10
"""One example in this many is held out."""
MAX_LABELS = 10_000


@dataclass(frozen=True)
class LabelledExample:
    """One line of .jsonl."""

    texts: tuple[str, ...]
    """The text, or one for each choice."""
    answer: int | None = None
    """Index of the right choice."""
    labels: tuple[str, ...] = ()
    """The label of a text."""
    number: float | None = None
    """The number of a text."""
    place: str = field(default="", repr=False)
    """File and line."""

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the texts and of their answer."""
        named: dict[str, object] = {
            "texts": self.texts,
            "answer": self.answer,
            "labels": self.labels,
        }
        if self.number is not None:
            named["number"] = self.number
        text = ", ".join(f"{name}={value!r}" for name, value in named.items())
        return hashlib.sha256(f"Example({text})".encode()).digest()


@dataclass(frozen=True)
class LabelledRow:
    """An example as ids."""

    example: LabelledExample
    ids: tuple[list[int], ...]
    """The ids of the text, or of each choice."""
    answer: float
    """Index of the label or of the right choice, or the number."""
    cut: bool
    """Whether text was left out because it is longer than the context."""


@dataclass(frozen=True, kw_only=True)
class LabelData(Data):
    """Labelled examples as ids."""

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: list[LabelledRow]
    validation: list[LabelledRow]


class ExampleFormat(ABC):
    """The lines of a task, and their batches."""

    fields: ClassVar[str]
    """The fields of a line, for messages."""
    read_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that `parse` reads, if others are to be counted in a note."""
    head_class: ClassVar[type[Head]]
    """The head on the body."""

    @staticmethod
    @abstractmethod
    def parse(record: Mapping[str, Any]) -> LabelledExample:
        """Return the example on a line; raise `UserError`, without the line, if it is wrong."""

    @abstractmethod
    def collate(self, rows: Sequence[LabelledRow]) -> Arrays:
        """Return a batch for the head's `losses`: ids, lengths, ..., answers (B,)."""


class LabelSources(Sources):
    """Records for one objective; without `validation`, a tenth of them is held out.

    `sources`, `validation` and the options of `reading` are those of `tiedgpt.data.documents`.

    The split follows the content, so equal lines are on the same side. Raises `UserError` or
    `CorruptInputError`, with file and line, for a wrong line, and `UserError` if no example is left
    to train on.
    """

    def __init__(
        self,
        task: ExampleFormat,
        sources: Sequence[str],
        validation: str | None = None,
        **reading: Any,
    ) -> None:
        self.task = task
        examples, self.notes = _read(task, sources, reading)
        if validation is not None:
            self.held_out, notes = _read(task, [validation], reading)
            self.notes += [f"--val: {note}" for note in notes]
            digests = {example.digest for example in self.held_out}
        else:
            order = sorted({example.digest for example in examples})
            digests = set(order[: max(1, len(order) // EXAMPLES_PER_HELD_OUT)])
            self.held_out = [example for example in examples if example.digest in digests]
            self.held_out.sort(key=lambda example: example.digest)  # any prefix is a random sample
        self.train = [example for example in examples if example.digest not in digests]
        if not self.train:
            raise UserError(
                f"{len(examples)} lines: after holding some out, none is left to train on",
                hint="give more",
            )
        self.labels: tuple[str, ...] = _name_labels(self.train, self.held_out)

    @override
    def digest(self) -> str:
        total = hashlib.sha256()
        for side in (self.train, self.held_out):
            total.update(len(side).to_bytes(8, "little") + b"".join(e.digest for e in side))
        return total.hexdigest()

    @override
    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        sides = self.train, self.train + self.held_out
        train, everything = ((text for e in side for text in e.texts) for side in sides)
        return train, everything

    @override
    def rows(self, tokenizer: Tokenizer, directory: Path) -> LabelRows:
        return LabelRows(self, tokenizer)


class LabelRows(Rows):
    """Labelled examples, encoded when the context is known."""

    def __init__(self, sources: LabelSources, tokenizer: Tokenizer) -> None:
        self.sources, self.task, self.tokenizer = sources, sources.task, tokenizer
        self.numbers = {name: number for number, name in enumerate(sources.labels)}
        self._data: dict[int, LabelData] = {}

    @override
    def at(self, context: int) -> LabelData:
        """Return the examples as ids, cut to the context."""
        if context not in self._data:
            self._data[context] = self._encode(context)
        return self._data[context]

    def _encode(self, context: int) -> LabelData:
        sources, labels = self.sources, self.sources.labels
        train, notes = self._encode_all("to train on", sources.train, context)
        validation, more_notes = self._encode_all("to validate on", sources.held_out, context)
        find_special_tokens = special_token_finder(self.tokenizer)
        texts = (t for example in (*sources.train, *sources.held_out) for t in example.texts)
        spelled = Counter(chain.from_iterable(map(find_special_tokens, texts)))
        longest = max(len(ids) for row in train for ids in row.ids)
        n_labels = f"; {format_count(len(labels), 'label')}" if labels else ""
        data = example_data(
            train,
            validation,
            self.task.collate,
            row_tokens=max(len(r.ids) * max(map(len, r.ids)) for r in (*train, *validation)),
            predicts_tokens=self.task.head_class.predicts_tokens,
            tokenizer=self.tokenizer,
            counts={
                "train_examples": {
                    "examples": len(train),
                    **({"labels": list(labels)} if labels else {}),
                },
                "val_examples": {"examples": len(validation)},
            },
            description={
                "examples": f"{len(train):,}; {len(validation):,} more to validate on{n_labels}",
                "tokens": f"{self.tokenizer.kind} vocabulary of {len(self.tokenizer):,}, the "
                f"longest row has {longest:,}",
            },
            notes=[*sources.notes, *notes, *more_notes, *note_special_tokens(spelled)],
        )
        return LabelData(**vars(data), labels=labels, train=train, validation=validation)

    def encode(self, example: LabelledExample, context: int) -> LabelledRow | None:
        """Return an example's ids and answer; None if a choice has no token to predict."""
        window = slice(-context, None) if self.task.head_class.keeps_end else slice(context)
        texts = [self.tokenizer.encode_document(text) for text in example.texts]
        ids = tuple(text[window] for text in texts)
        answer: float
        if example.number is not None:
            answer = example.number
        elif example.answer is None:
            answer = self.numbers[example.labels[0]]
        elif len(ids[example.answer]) < 2:
            return None
        else:
            answer = example.answer
        return LabelledRow(example, ids, answer, cut=max(map(len, texts)) > context)

    def _encode_all(
        self, what: str, examples: Sequence[LabelledExample], context: int
    ) -> tuple[list[LabelledRow], list[str]]:
        """Return the examples as ids, and notes about those left out or cut."""
        rows, notes = [], []
        for example in examples:
            try:
                row = self.encode(example, context)
            except UserError as error:
                raise UserError(f"{example.place}: {error}") from None
            if row is not None:
                rows.append(row)
        total, left_out = len(examples), len(examples) - len(rows)
        if not rows:
            raise UserError(
                f"no example {what} fits a context of {format_count(context, 'token')}",
                hint="give a longer --context",
            )
        if left_out:
            notes.append(
                f"left out {left_out:,} of {total:,} examples {what}: their answer does not fit "
                f"{context} tokens"
            )
        if cut := sum(row.cut for row in rows):
            notes.append(f"cut {cut:,} of {total:,} examples {what} to {context} tokens")
        return rows, notes


def _name_labels(
    train: Sequence[LabelledExample], held_out: Sequence[LabelledExample]
) -> tuple[str, ...]:
    """Return the labels, sorted; a held-out label without training examples is an error."""
    seen = Counter(name for example in train for name in example.labels)
    for example in held_out:
        for name in example.labels:
            if name not in seen:
                raise UserError(
                    f"{example.place}: no example to train on has the label {name!r}",
                    hint="give more of it, or --val",
                )
    if seen and not 2 <= len(seen) <= MAX_LABELS:
        raise UserError(
            f"{len(seen)} different labels ({', '.join(sorted(seen)[:3])}): 2 to {MAX_LABELS:,} "
            "can be learned"
        )
    numeric = all(name.lstrip("-").isdigit() for name in seen)
    return tuple(sorted(seen, key=(lambda name: (int(name), name)) if numeric else None))


def _read(
    task: ExampleFormat, sources: Sequence[str], reading: Mapping[str, Any]
) -> tuple[list[LabelledExample], list[str]]:
    """Return the examples of files, and notes about the files."""
    corpus, unread = documents(sources, **reading, only_records=True), UnreadFields()

    def parse(record: dict[str, Any], place: str) -> LabelledExample:
        example = replace(task.parse(record), place=place)
        if task.read_fields:
            unread.count(record, task.read_fields)
        return example

    examples = [*parse_records(corpus.records(task.fields), task.fields, parse)]
    if not examples:
        names = ", ".join(sources)
        raise UserError(f"{names} has no lines", hint=f"give .jsonl, each line {task.fields}")
    return examples, [*corpus.remarks.notes(), *unread.notes()]
