"""Searches side by side in one session: what all of them want read is read in one step.

A search is a generator over slots of its own, a `Lane`. It yields what it wants read, a list of
`Read`s, and is sent the logits; in between it may yield pieces of text; it returns what it found.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, Protocol, TypeVar

from tiedgpt.infer.session import Logits, Runner, Session, Slots
from tiedgpt.infer.speculation import Price

T = TypeVar("T")
FEW = 2
"""Ids of which all get logits where others' do: one call costs less than their logits."""


@dataclass(frozen=True)
class Read:
    """Ids to be appended to a slot, and what is wanted of them; see `Session.read`."""

    slot: int
    ids: Sequence[int]
    every: bool = False
    drafted: int = 0
    """How many of the ids, the last ones, are a guess."""


Reading = Generator[list[Read], list[Logits], list[Logits]]
Steps = Generator[list[Read] | str, list[Logits], T]


class Lane(Slots, Protocol):
    """The slots of one search; as a `Session`, but what is read comes when others read, too."""

    @property
    def price(self) -> Price:
        """What drafts cost."""

    def read(self, reads: Sequence[Read]) -> Reading:
        """Append ids to slots and return the logits of each: `logits = yield from lane.read(..)`.

        Each slot at most once, as with `Session.read`.
        """


@dataclass(frozen=True)
class Search(Generic[T]):
    """A search that has not begun, and the room that it needs."""

    slots: int
    capacity: int
    begin: Callable[[Lane], Steps[T]]


class Joint:
    """A session whose slots searches share; one owner calls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.price = Price()

    def lane(self, first: int, slots: int, capacity: int) -> Part:
        """Return slots from `first` on, emptied, as a search's own."""
        for slot in range(first, first + slots):
            self.session.cut(slot, 0)
        return Part(self, first, slots, capacity)

    def read(self, wanted: Sequence[Read]) -> list[Logits]:
        """Read in one call, or in two where only some want all logits; learn what drafts cost."""
        began = time.perf_counter()
        few = FEW if any(read.every for read in wanted) else 0
        logits: dict[int, Logits] = {}
        for every in (False, True):
            group = [r for r in wanted if (r.every or len(r.ids) <= few) == every]
            if group:
                slots, ids = [r.slot for r in group], [r.ids for r in group]
                logits |= zip(slots, self.session.read(slots, ids, every=every), strict=True)
        seconds = time.perf_counter() - began
        if all(len(r.ids) - r.drafted == 1 for r in wanted):
            if drafts := [r.drafted for r in wanted if r.drafted]:
                self.price.note_drafted(seconds, sequences=len(wanted), drafts=drafts)
            else:
                self.price.note_plain(seconds, sequences=len(wanted))
        return [logits[r.slot] if r.every else logits[r.slot][-1:] for r in wanted]


class Part:
    """A `Lane`: slots of a session from `first` on."""

    def __init__(self, joint: Joint, first: int, slots: int, capacity: int) -> None:
        self._session, self._first = joint.session, first
        self.config, self.price = joint.session.config, joint.price
        self.slots, self.capacity = slots, capacity

    @property
    def lengths(self) -> list[int]:
        """Positions that are filled, by slot."""
        return self._session.lengths[self._first : self._first + self.slots]

    def read(self, reads: Sequence[Read]) -> Reading:
        """Append ids to slots; see `Lane.read`."""
        return (yield [replace(read, slot=self._first + read.slot) for read in reads])

    def cut(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""
        self._session.cut(self._first + slot, length)

    def copy(self, source: int, target: int) -> None:
        """Let a slot hold what another holds."""
        self._session.copy(self._first + source, self._first + target)


@dataclass
class _Running(Generic[T]):
    """A search in its lane."""

    number: int
    first: int
    steps: Steps[T]
    wants: list[Read]


def together(runner: Runner, searches: Sequence[Search[T]], *, batch_size: int) -> list[T]:
    """Run searches side by side, as many as have `batch_size` slots in all, at least one.

    Each finds what it finds alone; one that ends leaves its slots to the next.
    """
    width = max(search.slots for search in searches)
    n_lanes = min(len(searches), max(1, batch_size // width))
    capacity = max(search.capacity for search in searches)
    joint = Joint(runner.session(slots=n_lanes * width, capacity=capacity))
    free = [width * lane for lane in range(n_lanes)]
    waiting = deque(enumerate(searches))
    running: list[_Running[T]] = []
    found: dict[int, T] = {}
    while waiting or running:
        while waiting and free:
            number, search = waiting.popleft()
            first = free.pop()
            steps = search.begin(joint.lane(first, search.slots, search.capacity))
            running.append(_Running(number, first, steps, _wants(steps, next(steps))))
        logits = iter(joint.read([read for one in running for read in one.wants]))
        for one in list(running):
            try:
                one.wants = _wants(one.steps, one.steps.send(list(islice(logits, len(one.wants)))))
            except StopIteration as end:
                found[one.number] = end.value
                running.remove(one)
                free.append(one.first)
    return [found[number] for number in range(len(searches))]


def _wants(steps: Steps[T], given: list[Read] | str) -> list[Read]:
    """Return what a search wants read, leaving out its pieces of text."""
    while isinstance(given, str):
        given = next(steps)
    return given


def streamed(runner: Runner, search: Search[T]) -> Generator[str, None, T]:
    """Run one search; yield its pieces of text as they come, return what it found."""
    joint = Joint(runner.session(slots=search.slots, capacity=search.capacity))
    return _alone(joint, search.begin(joint.lane(0, search.slots, search.capacity)))


def run(joint: Joint, steps: Steps[T]) -> T:
    """Run steps to their end; return what they found."""
    alone = _alone(joint, steps)
    while True:
        try:
            next(alone)
        except StopIteration as end:
            found: T = end.value
            return found


def _alone(joint: Joint, steps: Steps[T]) -> Generator[str, None, T]:
    try:
        given = next(steps)
        while True:
            if isinstance(given, str):
                yield given
                given = next(steps)
            else:
                given = steps.send(joint.read(given))
    except StopIteration as end:
        found: T = end.value
        return found
