"""Drafts from the text itself: what followed the same tokens before may follow them again.

Saxena 2023, "Prompt Lookup Decoding". A draft is checked by reading it in one step, and kept as far
as it is what the sequence's own draws choose: the text is the same as without, whatever the
temperature.

Drafts must be worth their price. So each sequence guesses all the time, which costs a look-up, and
sees how far its guesses come true; they are read as drafts only where that has lately gained more
tokens than reading them costs.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAMS = (3, 2)
"""Lengths of what must have occurred before, the first that has being taken."""
MEMORY = 0.25
"""The weight of the newest guess in what guesses gain."""
MARGIN = 2.0
"""Drafts are read where they promise this times their price."""


class Drafter:
    """Guesses how one sequence goes on, and knows how good its guesses are."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.gain = 0.0
        """Tokens of a guess that lately came true."""
        self._ends: dict[tuple[int, ...], int] = {}  # where these tokens last ended
        self._n_indexed = 0
        self._guess: list[int] = []
        self._at = 0  # where the guess begins

    def draft(self, ids: Sequence[int], *, price: float, room: int) -> list[int]:
        """Return what probably follows `ids`, at most `room` tokens; [] where it would not pay.

        `price`: what reading a draft costs, in tokens that could be generated meanwhile.
        """
        self._index(ids)
        hits = self._settle(ids)
        if not self._guess:
            self._guess, self._at, hits = self._look_up(ids), len(ids), 0
        promise = max(self.gain, hits / 2)
        if promise <= MARGIN * price:
            return []
        n = min(room, 2 + int(2 * promise))
        return self._guess[len(ids) - self._at :][: max(0, n)]

    def _index(self, ids: Sequence[int]) -> None:
        """Note where each run of tokens ends, except at the very end: nothing follows there yet."""
        for end in range(max(self._n_indexed, min(GRAMS)), len(ids)):
            for n in GRAMS:
                if end >= n:
                    self._ends[tuple(ids[end - n : end])] = end
        self._n_indexed = max(self._n_indexed, len(ids))

    def _settle(self, ids: Sequence[int]) -> int:
        """Compare the guess with what came; return how much of it has, if it still stands."""
        came = ids[self._at :]
        hits = 0
        for guessed, token in zip(self._guess, came, strict=False):
            if guessed != token:
                break
            hits += 1
        if hits < min(len(came), len(self._guess)) or hits == len(self._guess):
            if self._guess:
                self.gain += MEMORY * (hits - self.gain)
            self._guess = []
        return hits

    def _look_up(self, ids: Sequence[int]) -> list[int]:
        """Return what followed the newest tokens last time, going round in a loop."""
        for n in GRAMS:
            end = self._ends.get(tuple(ids[-n:]))
            if end is not None and len(ids) > n:
                run = ids[end:]
                return [run[i % len(run)] for i in range(self.max_tokens)]
        return []


class Price:
    """What reading a draft costs, learnt from the clock: in tokens, for one sequence of a batch."""

    UNKNOWN = 0.25
    """Before any was read."""
    FORGETTING = 0.005
    """How fast, step by step, a price that was high is given another chance."""

    def __init__(self) -> None:
        self.tokens = self.UNKNOWN
        self._plain: dict[int, float] = {}  # seconds of a step of so many sequences, no drafts

    def note_plain(self, seconds: float, *, sequences: int) -> None:
        """A step that read one token of each sequence took this long."""
        before = self._plain.get(sequences, seconds)
        self._plain[sequences] = min(seconds, before + 0.2 * (seconds - before))
        self.tokens += self.FORGETTING * (self.UNKNOWN - self.tokens)

    def note_drafted(self, seconds: float, *, sequences: int, drafts: int) -> None:
        """A step that also read `drafts` drafts took this long."""
        if sequences in self._plain:
            extra = max(0.0, seconds / self._plain[sequences] - 1) * sequences / drafts
            self.tokens += 0.5 * (min(extra, 10.0) - self.tokens)
