"""Ids that come one at a time -> text as it becomes certain, up to the first stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiedgpt.text import Tokenizer


class Piece(NamedTuple):
    """The part of the text that belongs to a token."""

    at: int
    """The number of the token among the new ones, from 0."""
    text: str
    offset: int
    """Start of the part in the text, in characters."""


class Detokenizer:
    """The text of a sequence's new tokens.

    The text ends where the earliest match of any of the `stops` begins, however tokens divide it.
    A character is certain once it is complete and no stop string can begin at it or before it.
    """

    def __init__(self, tokenizer: Tokenizer | None, after: int, stops: Sequence[str] = ()) -> None:
        self.has_stopped = False
        """Whether a stop string ends the text."""
        self._decoder = None if tokenizer is None else tokenizer.stream(after=after)
        self._stops = tuple(stops)
        self._decoded = ""  # with text that a stop string cuts off, or may cut off
        self._n_certain = 0
        self._ends = list[int]()  # of each token, its end in the decoded text
        self._n_released = 0

    @property
    def text(self) -> str:
        """The part of the text that is certain; all of it, once it is finished."""
        return self._decoded[: self._n_certain]

    def push(self, token: int | None) -> None:
        """Add a token; None is one without text, such as end-of-text."""
        if token is not None and self._decoder is not None:
            self._decoded += self._decoder.push(token)
        self._ends.append(len(self._decoded))
        n_open = max((self._open_length(stop) for stop in self._stops), default=0)
        self._settle(len(self._decoded) - n_open)

    def finish(self) -> None:
        """End the text: part of a character becomes U+FFFD, part of a stop string is text."""
        if self._decoder is not None and self._n_released < len(self._ends):
            self._decoded += self._decoder.finish()
            self._ends[-1] = len(self._decoded)
        self._settle(len(self._decoded))

    def release(self, *, is_last: bool = False) -> Iterator[Piece]:
        """Yield each token, once, whose text is certain; with `is_last` all that are left."""
        while self._n_released < len(self._ends):
            at = self._n_released
            begin, end = self._ends[at - 1] if at else 0, self._ends[at]
            is_unfinished = end == begin and at == len(self._ends) - 1 and self._decoder is not None
            if not is_last and (end > self._n_certain or is_unfinished):
                return
            self._n_released += 1
            piece = self._decoded[begin : min(end, self._n_certain)]
            yield Piece(at, piece, min(begin, self._n_certain))

    def _settle(self, certain: int) -> None:
        """Make the text certain up to `certain`, or to a complete stop string before that."""
        if self.has_stopped:
            return
        matches = (self._decoded.find(stop, self._n_certain) for stop in self._stops)
        first = min((at for at in matches if at >= 0), default=len(self._decoded) + 1)
        self.has_stopped = first <= certain
        self._n_certain = min(first, certain)

    def _open_length(self, stop: str) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        most = min(len(stop) - 1, len(self._decoded) - self._n_certain)
        lengths = range(most, 0, -1)
        return next((n for n in lengths if stop.startswith(self._decoded[-n:])), 0)
