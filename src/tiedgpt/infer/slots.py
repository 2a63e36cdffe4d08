"""The slots of a session: which are free, what each holds, and what requests run in them.

A request is a generator that gets its slots. It yields a list of `TokensToRun`, and receives a
`RunResult` for each after all of them have run, together with those of other requests.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tiedgpt.infer.prompts import common_prefix
from tiedgpt.infer.sampling import NextToken
from tiedgpt.infer.session import Logits, Session, require_memory

SCORED_AT_ONCE = 64
"""Tokens that are run at once if each is scored: this bounds the (n, V) logits."""


@dataclass(frozen=True, slots=True)
class TokensToRun:
    """Ids to append to a slot."""

    slot_id: int
    ids: Sequence[int]
    all_logits: bool = False
    """Whether the logits after every id are needed, or only those after the last."""
    sample: bool = False
    """Whether the next token of the request's sequence is sampled after the last id."""


class RunResult(NamedTuple):
    """The logits of `TokensToRun`, and the token that was sampled, if any."""

    logits: Logits
    """(1, V) after the last id, or (n, V) after every one; the next step overwrites them."""
    next_token: NextToken | None = None


T = TypeVar("T")
Decoding = Generator[list[TokensToRun], list[RunResult], T]
"""One list yields either one `TokensToRun`, or several of one id each."""


class SlotPool:
    """All slots of a session: which are free, and the ids that each holds."""

    def __init__(self, session: Session) -> None:
        n = session.n_slots
        self.session = session
        self.cached_ids: list[list[int]] = [[] for _ in range(n)]
        """By slot, the ids whose keys and values it holds; those of a free slot may be reused."""
        self.free = list(range(n))
        """Free slots, the longest unused first."""
        self._granted, self._filled = [0] * n, [0] * n
        """By slot, how many positions may be filled, and how many have been at any time."""

    def take(self, n: int, prompt: Sequence[int], length: int = 0) -> tuple[list[int], int]:
        """Take n free slots; return them and how many of the prompt's ids the first one holds.

        The last id of the prompt is always read again: its logits are needed. Raises `NoRoomError`
        if memory is too small to fill each slot up to `length`.
        """
        best, shared = self.longest_prefix(prompt)
        first = self.free[0]
        lost = len(self.cached_ids[best]) - shared
        if shared and best in self.free and lost <= len(self.cached_ids[first]):
            first = best  # otherwise a copy of the prefix overwrites less
        slot_ids = [first, *[slot_id for slot_id in self.free if slot_id != first][: n - 1]]
        self._grant(slot_ids, length)
        self.free = [slot_id for slot_id in self.free if slot_id not in slot_ids]
        if first != best and shared:
            self.copy(best, first)
        self.truncate(first, shared)
        for slot_id in slot_ids[1:]:
            self.truncate(slot_id, 0)
        return slot_ids, shared

    def _grant(self, slot_ids: list[int], length: int) -> None:
        """Reserve memory for slots up to a length, beside what other slots may still fill."""
        granted = list(self._granted)
        for slot_id in slot_ids:
            granted[slot_id] = max(length, granted[slot_id])
        self._note_filled()
        missing = sum(max(0, a - b) for a, b in zip(granted, self._filled, strict=True))
        if missing and self.session.position_bytes:
            what = f"a cache of {missing} positions more"
            require_memory(missing * self.session.position_bytes, what)
        self._granted = granted

    def _note_filled(self) -> None:
        self._filled = [
            max(n, len(ids)) for n, ids in zip(self._filled, self.cached_ids, strict=True)
        ]

    def longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the slot that holds most of the prompt, and how many of its ids."""
        best, shared = 0, 0
        for slot_id, ids in enumerate(self.cached_ids):
            n = common_prefix(ids, prompt[:-1])
            if n > shared:
                best, shared = slot_id, n
        return best, shared

    def release(self, slot_ids: Sequence[int]) -> None:
        """Free slots; their ids may be reused until they are taken."""
        self.free.extend(slot_ids)
        self._note_filled()
        for slot_id in slot_ids:
            self._granted[slot_id] = self._filled[slot_id]

    def read(self, chunks: Sequence[TokensToRun]) -> list[Logits]:
        """Append ids to their slots; return the logits of each chunk."""
        logits = self.session.read(
            [tokens.slot_id for tokens in chunks],
            [tokens.ids for tokens in chunks],
            all_logits={tokens.slot_id for tokens in chunks if tokens.all_logits},
        )
        for tokens in chunks:
            self.cached_ids[tokens.slot_id] += tokens.ids
        return logits

    def truncate(self, slot_id: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""
        self.session.truncate(slot_id, length)
        del self.cached_ids[slot_id][length:]

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a slot to another slot."""
        self.session.copy(source, target)
        self.cached_ids[target] = list(self.cached_ids[source])
