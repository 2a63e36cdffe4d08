"""Drafts from the text itself: what followed the same tokens before may follow them again.

Saxena 2023, "Prompt Lookup Decoding". A draft is checked by reading it in one step, and kept as far
as it is what the sequence's own draws choose: the text is the same as without, whatever the
temperature.

Drafts must be worth their price. So each sequence guesses all the time, which costs a look-up, and
sees how far its guesses come true. Of a guess as much is read as a draft as promises the most
tokens for the time, and nothing where that would not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

GRAMS = (3, 2)
"""Lengths of what must have occurred before, the first that has being taken."""
MEMORY = 0.25
"""The weight of the newest guess in what is known of guesses."""
MARGIN = 1.25
LEAST = 0.3
"""Drafts are read where they promise more tokens than this, and MARGIN times their price."""


class Drafter:
    """Guesses how one sequence goes on, and knows how good its guesses are."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._hits, self._misses = 0.0, 1.0  # of a guess, lately
        self._ends: dict[tuple[int, ...], int] = {}  # where these tokens last ended
        self._n_indexed = 0
        self._guess: list[int] = []
        self._at = 0  # where the guess begins

    def draft(self, ids: Sequence[int], *, price: Callable[[int], float], room: int) -> list[int]:
        """Return what probably follows `ids`, at most `room` tokens; [] where it would not pay.

        `price`: draft's length -> what reading it costs, in tokens that could be generated
        meanwhile.
        """
        self._index(ids)
        hits = self._settle(ids)
        if not self._guess:
            self._guess, self._at, hits = self._look_up(ids), len(ids), 0
        likely = max(self._hits / (self._hits + self._misses), hits / (hits + 2))
        rest = self._guess[len(ids) - self._at :][: max(0, room)]
        return rest[: _best_length(likely, len(rest), price)]

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
        failed = hits < min(len(came), len(self._guess))
        if self._guess and (failed or hits == len(self._guess)):
            self._hits += MEMORY * (hits - self._hits)
            self._misses += MEMORY * (failed - self._misses)
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


def _best_length(likely: float, most: int, price: Callable[[int], float]) -> int:
    """Return the length of draft that gives the most tokens for the time; 0 where none pays.

    `likely`: how probably a token comes true after those before it did.
    """
    best, highest, promise = 0, 1.0, 0.0
    if likely <= LEAST * (1 - likely):  # however long
        return best
    for n in range(1, most + 1):
        promise += likely**n
        cost = price(n)
        if promise > LEAST + MARGIN * cost and (1 + promise) / (1 + cost) > highest:
            best, highest = n, (1 + promise) / (1 + cost)
    return best


class Price:
    """What reading drafts costs, learnt from the clock: in tokens, for one sequence of a batch."""

    UNKNOWN = 0.1
    """Of each token beyond the longest draft that was read."""
    FORGETTING = 0.001
    """How fast, step by step, a price that was high is given another chance."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step of so many sequences, no drafts
        self._known: dict[int, float] = {}  # by the draft's length

    def of(self, n: int) -> float:
        """Return the price of a draft of n tokens, by those whose lengths are the nearest."""
        shorter = max((m for m in self._known if m <= n), default=0)
        longer = min((m for m in self._known if m > n), default=0)
        low = self._known.get(shorter, 0.0)
        a_token = (self._known[longer] - low) / (longer - shorter) if longer else self.UNKNOWN
        return low + a_token * (n - shorter)

    def note_plain(self, seconds: float, *, sequences: int) -> None:
        """A step that read one token of each sequence took this long."""
        before = self._plain.get(sequences, seconds)
        self._plain[sequences] = min(seconds, before + 0.2 * (seconds - before))
        for n in self._known:
            self._known[n] *= 1 - self.FORGETTING

    def note_drafted(self, seconds: float, *, sequences: int, drafts: Sequence[int]) -> None:
        """A step that also read drafts of these lengths took this long."""
        if sequences not in self._plain:
            return
        a_token = max(0.0, seconds / self._plain[sequences] - 1) * sequences / sum(drafts)
        for n in set(drafts):
            before = self.of(n)  # a step that was held up is not to count for too much
            self._known[n] = before + 0.5 * (min(a_token * n, 3 * before + 1) - before)
