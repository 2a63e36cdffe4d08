"""What the four kinds of labelled work have in common.

A line of .jsonl (`parse`) becomes an example; an example and a tokenizer (`prepare`) become rows of
ids with their answer; rows (`collate`) become a batch of a head's `losses`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, pad
from tiedgpt.text import Tokenizer
from tiedgpt.train.task import Arrays

UNANSWERED = IGNORED


class Malformed(Exception):
    """What is wrong with a line, in words; whoever reads the file adds where."""


@dataclass(frozen=True)
class Prepared:
    """An example as ids: one row, or one for each choice; and its answer."""

    rows: tuple[list[int], ...]
    answer: NDArray[np.int64]
    cut: bool
    """Whether text was left out because the context is too short for it."""


@dataclass(frozen=True)
class Right:
    """How much of what was asked was answered rightly."""

    right: int
    asked: int


class Exercise(ABC):
    """One kind of labelled work. `Any` below is what its own `parse` returns."""

    fields: ClassVar[str]
    """What a line looks like, for messages."""
    head_class: ClassVar[type[Head]]
    """What is put on the body."""
    use: ClassVar[str]
    """How the trained `head` is asked, in Python."""
    measure: ClassVar[str]
    """What the share of right answers is called."""

    @abstractmethod
    def parse(self, record: Mapping[str, Any]) -> Any:
        """Return the example that a line holds, or raise `Malformed`."""

    @abstractmethod
    def texts(self, example: Any) -> Iterable[str]:
        """Return its texts, from which a vocabulary can be learned."""

    def labels(self, example: Any) -> Iterable[str]:
        """Return the names of the labels that it bears."""
        return ()

    @abstractmethod
    def prepare(
        self, example: Any, tokenizer: Tokenizer, context: int, numbers: Mapping[str, int]
    ) -> Prepared | None:
        """Return its ids and its answer; None where the answer does not fit the context.

        `numbers` says which label has which number.
        """

    @abstractmethod
    def head(self, gpt: GPT, labels: Sequence[str]) -> Head:
        """Put the head that learns this on a body."""

    def collate(self, rows: Sequence[Prepared]) -> Arrays:
        """Return a batch for the head's `losses`: ids (B, T), lengths (B,), answers (B, ...)."""
        ids, lengths = pad([row.rows[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.int64)

    @abstractmethod
    def judge(self, head: Head, batch: Sequence[Tensor]) -> Right:
        """Return how many answers of a batch the head gives rightly."""

    @abstractmethod
    def show(self, head: Head, example: Any, prepared: Prepared, tokenizer: Tokenizer) -> str:
        """Return an example beside what the head says of it."""


def text_in(record: Mapping[str, Any], field: str) -> str:
    """Return a string with something in it, or say that there is none."""
    value = record.get(field)
    if not isinstance(value, str):
        raise Malformed(f"no string in the field {field!r}; it holds {_held(record)}")
    if not value.strip():
        raise Malformed(f"the field {field!r} is empty")
    return value


def list_in(record: Mapping[str, Any], field: str) -> list[Any]:
    """Return a list with something in it, or say that there is none."""
    value = record.get(field)
    if not isinstance(value, list) or not value:
        raise Malformed(f"no list in the field {field!r}; it holds {_held(record)}")
    return value


def label_name(value: Any) -> str:
    """Return a label's name; numbers may be labels, too."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise Malformed(f"the label {value!r} is neither a name nor a whole number")
    return str(value)


class Places:
    """Where in a text its tokens stand.

    Raises `Malformed` where the tokens are not the text byte for byte.
    """

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer, text: str) -> None:
        pieces = [tokenizer.token_bytes(id) for id in ids]
        if b"".join(pieces) != text.encode():
            raise Malformed("the tokenizer does not keep this text as it is: no place can be found")
        self.text = text
        self._starts = list(accumulate(map(len, pieces[:-1]), initial=0))  # in bytes

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last token that have a byte of characters [start, end)."""
        first = len(self.text[:start].encode())
        last = first + len(self.text[start:end].encode()) - 1
        return bisect_right(self._starts, first) - 1, bisect_right(self._starts, last) - 1


def _held(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "nothing"
