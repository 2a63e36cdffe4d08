"""N-gram speculative decoding: the tokens that followed the same n-gram before are the draft.

Saxena 2023, "Prompt Lookup Decoding". A draft is read in one step with the newest token, and its
tokens are accepted while they equal the tokens that are chosen: at any temperature the text is the
same as without drafts.

A draft must be worth its cost. Each sequence therefore makes guesses all the time, which costs a
look-up, and counts how often they are right. A draft is the part of a guess that promises the most
tokens for the time, or empty if none pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

GRAMS = (3, 2)
"""Lengths of the n-grams that are looked up, in this order."""
MEMORY = 0.25
"""The weight of the newest guess in the running averages."""
MARGIN = 1.25
LEAST = 0.3
"""A draft is read if it promises more tokens than this plus MARGIN times its price."""


class Drafter:
    """Guesses how one sequence goes on, and measures how good its guesses are."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._hits, self._misses = 0.0, 1.0  # running averages of a guess
        self._ends: dict[tuple[int, ...], int] = {}  # by n-gram, where it last ended
        self._n_indexed = 0
        self._guess: list[int] = []
        self._at = 0  # where the guess begins

    def draft(self, ids: Sequence[int], *, price: Callable[[int], float], room: int) -> list[int]:
        """Return a draft of what follows `ids`, at most `room` tokens; [] if none pays.

        `price(n)` is the cost of reading a draft of n tokens, in tokens that could be generated in
        the same time.
        """
        self._index(ids)
        hits = self._settle(ids)
        if not self._guess:
            self._guess, self._at, hits = self._look_up(ids), len(ids), 0
        likely = max(self._hits / (self._hits + self._misses), hits / (hits + 2))
        rest = self._guess[len(ids) - self._at :][: max(0, room)]
        return rest[: _best_length(likely, len(rest), price)]

    def _index(self, ids: Sequence[int]) -> None:
        """Note where each n-gram ends, except for the last ones: nothing follows them yet."""
        for end in range(max(self._n_indexed, min(GRAMS)), len(ids)):
            for n in GRAMS:
                if end >= n:
                    self._ends[tuple(ids[end - n : end])] = end
        self._n_indexed = max(self._n_indexed, len(ids))

    def _settle(self, ids: Sequence[int]) -> int:
        """Compare the guess with the tokens that came; return how many of them were right."""
        came = ids[self._at :]
        hits = 0
        for guessed, token in zip(self._guess, came, strict=False):
            if guessed != token:
                break
            hits += 1
        is_wrong = hits < min(len(came), len(self._guess))
        if self._guess and (is_wrong or hits == len(self._guess)):
            self._hits += MEMORY * (hits - self._hits)
            self._misses += MEMORY * (is_wrong - self._misses)
            self._guess = []
        return hits

    def _look_up(self, ids: Sequence[int]) -> list[int]:
        """Return what followed the newest n-gram last time, repeated if it is short."""
        for n in GRAMS:
            end = self._ends.get(tuple(ids[-n:]))
            if end is not None and len(ids) > n:
                run = ids[end:]
                return [run[i % len(run)] for i in range(self.max_tokens)]
        return []


def _best_length(likely: float, most: int, price: Callable[[int], float]) -> int:
    """Return the length of the draft that gives the most tokens for the time; 0 if none pays.

    `likely` is the probability that a token is right if those before it were.
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
    """The measured cost of reading drafts, in tokens, for one sequence of a batch."""

    UNKNOWN = 0.1
    """The price of each token beyond the longest draft that was read."""
    FORGETTING = 0.001
    """The part by which prices fall in a step, so that a high one is tried again."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step of so many sequences, no drafts
        self._known: dict[int, float] = {}  # by the draft's length

    def of(self, n: int) -> float:
        """Return the price of a draft of n tokens, interpolated between measured lengths."""
        shorter = max((m for m in self._known if m <= n), default=0)
        longer = min((m for m in self._known if m > n), default=0)
        low = self._known.get(shorter, 0.0)
        a_token = (self._known[longer] - low) / (longer - shorter) if longer else self.UNKNOWN
        return low + a_token * (n - shorter)

    def note_plain(self, seconds: float, *, sequences: int) -> None:
        """Record the time of a step that read one token of each sequence."""
        before = self._plain.get(sequences, seconds)
        self._plain[sequences] = min(seconds, before + 0.2 * (seconds - before))
        for n in self._known:
            self._known[n] *= 1 - self.FORGETTING

    def note_drafted(self, seconds: float, *, sequences: int, drafts: Sequence[int]) -> None:
        """Record the time of a step that also read drafts of these lengths."""
        if sequences not in self._plain:
            return
        a_token = max(0.0, seconds / self._plain[sequences] - 1) * sequences / sum(drafts)
        for n in set(drafts):
            before = self.of(n)  # so that one slow step does not count too much
            self._known[n] = before + 0.5 * (min(a_token * n, 3 * before + 1) - before)
