"""The slots of a session as one request sees them, and the steps in which a request reads.

A request is a generator. It yields what it wants, and is sent the answers once all requests of the
batch have been served: a list of `Read`s is answered with the logits after each, a list of
`Choice`s with the tokens that were chosen.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.room import require_memory
from tiedgpt.infer.sampling import Choice, Chosen
from tiedgpt.infer.session import Logits, Session
from tiedgpt.infer.speculation import Price


@dataclass(slots=True, eq=False)
class Read:
    """Ids to be appended to a slot, and how far that has come; see `Session.read`."""

    slot: int
    ids: Sequence[int]
    every: bool = False
    """Whether the logits after every id are wanted, not only after the last."""
    drafted: int = 0
    """How many of the ids, the last ones, are a guess."""
    number: int = -1
    """The slot's number in the session."""
    n_left: int = 0
    """Ids that have not been read."""
    logits: Logits | None = None

    def __post_init__(self) -> None:
        self.n_left = len(self.ids)

    @property
    def is_decode(self) -> bool:
        """Whether it is one newest token, with or without a draft."""
        return len(self.ids) - self.drafted == 1

    def add(self, n: int, logits: Logits) -> None:
        """Note that n more ids were read, and the logits after each or after the last."""
        self.n_left -= n
        if self.every and self.logits is not None:
            self.logits = np.concatenate([self.logits, logits])
        elif self.every or not self.n_left:
            self.logits = logits


T = TypeVar("T")
Wanted = list[Read] | list[Choice]
Steps = Generator[Wanted, list[Any], T]


def choose(choices: list[Choice]) -> Steps[list[Chosen | UserError]]:
    """Have the scheduler choose tokens, together with those of other requests."""
    return cast("list[Chosen | UserError]", (yield choices))


class SlotPool:
    """All slots of a session: which are free, and the ids that each holds."""

    def __init__(self, session: Session) -> None:
        n = session.slots
        self.session, self.price = session, Price()
        self.held: list[list[int]] = [[] for _ in range(n)]
        """By slot, the ids whose keys and values it has; of a free slot, for reuse."""
        self.free = list(range(n))
        """Free slots, the longest unused first."""
        self._granted, self._filled = [0] * n, [0] * n
        """By slot, positions that may be filled, and that were, now or before."""

    def take(self, n: int, prompt: Sequence[int], length: int = 0) -> tuple[Slots, int]:
        """Take n free slots; return them, and how many ids of the prompt the first holds.

        The last id of the prompt is always left to be read: its logits are wanted. Raises
        `NoRoomError` where there is no memory to fill each up to `length`.
        """
        best, shared = self.longest_prefix(prompt)
        first = self.free[0]
        lost = len(self.held[best]) - shared
        if shared and best in self.free and lost <= len(self.held[first]):
            first = best  # else a copy costs less of what is held
        slots = [first, *[slot for slot in self.free if slot != first][: n - 1]]
        self._grant(slots, length)
        self.free = [slot for slot in self.free if slot not in slots]
        if first != best and shared:
            self.copy(best, first)
        self.truncate(first, shared)
        for slot in slots[1:]:
            self.truncate(slot, 0)
        return Slots(self, slots), shared

    def _grant(self, slots: list[int], length: int) -> None:
        """Let slots be filled up to a length, with memory left for what others may still fill."""
        granted = list(self._granted)
        for slot in slots:
            granted[slot] = max(length, granted[slot])
        self._note_filled()
        missing = sum(max(0, a - b) for a, b in zip(granted, self._filled, strict=True))
        if missing and self.session.position_bytes:
            what = f"a cache of {missing} positions more"
            require_memory(missing * self.session.position_bytes, what)
        self._granted = granted

    def _note_filled(self) -> None:
        self._filled = [max(n, len(ids)) for n, ids in zip(self._filled, self.held, strict=True)]

    def longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the slot that holds most of the prompt, and how many of its ids."""
        best, shared = 0, 0
        for slot, ids in enumerate(self.held):
            n = common_prefix(ids, prompt[:-1])
            if n > shared:
                best, shared = slot, n
        return best, shared

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; what they hold may be reused until they are taken."""
        self.free.extend(slots)
        self._note_filled()
        for slot in slots:
            self._granted[slot] = self._filled[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""
        self.session.cut(slot, length)
        del self.held[slot][length:]

    def copy(self, source: int, target: int) -> None:
        """Let a slot hold what another holds."""
        self.session.copy(source, target)
        self.held[target] = list(self.held[source])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two texts have in common from their beginning on."""
    if list(a[: len(b)]) == list(b[: len(a)]):
        return min(len(a), len(b))
    return next(at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class Slots:
    """Slots of a session, numbered from 0, that a request has for itself."""

    def __init__(self, pool: SlotPool, numbers: list[int]) -> None:
        self.pool, self.numbers = pool, numbers
        self.config: GPTConfig = pool.session.config
        self.capacity = pool.session.capacity
        """Positions that a slot has room for."""

    def __len__(self) -> int:
        """The number of slots."""
        return len(self.numbers)

    def length(self, slot: int) -> int:
        """Return how many positions of a slot are filled."""
        return self.pool.session.lengths[self.numbers[slot]]

    def read(self, reads: Sequence[Read]) -> Steps[list[Logits]]:
        """Append ids to slots; return the logits of each: `logits = yield from slots.read(..)`.

        Each slot at most once. Logits hold until the next read.
        """
        for read in reads:
            read.number = self.numbers[read.slot]
        return cast("list[Logits]", (yield list(reads)))

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""
        self.pool.truncate(self.numbers[slot], length)

    def copy(self, source: int, target: int) -> None:
        """Let a slot hold what another holds."""
        self.pool.copy(self.numbers[source], self.numbers[target])

    def score(
        self, logits: Logits, targets: Sequence[int], n_tokens: int | None = None
    ) -> tuple[list[float], list[int]]:
        """Return logprobs and ranks of ids after logits (n, V); see `Session.score`."""
        return self.pool.session.score(logits, targets, n_tokens)
