"""The interface of the engine's backends, torch and the CPU kernels.

A `Runner` is a model that is ready to compute; a `Session` holds the KV cache of some sequences.
Ids go in, logits come out. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.infer.sampling import NextToken, SamplingInput
from tiedgpt.runtime import free_memory

Logits = NDArray[np.float32]
"""(n, V): the logits of the next token after the last id, or after each id, that was read."""


class Session(Protocol):
    """Sequences in slots; each read appends ids to a slot."""

    config: GPTConfig
    n_slots: int
    """How many sequences there is room for."""
    capacity: int
    """Positions that a slot has room for."""
    position_bytes: int
    """Bytes that a position takes when it is filled; 0 if all memory was taken at the start."""

    @property
    def lengths(self) -> list[int]:
        """Positions that are filled, by slot."""

    def truncate(self, slot_id: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a slot to another slot."""

    def read(
        self,
        slot_ids: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        all_logits: Collection[int] = (),
    ) -> list[Logits]:
        """Append ids[i] to slot slot_ids[i]; return the logits (1, V) after the last id of each.

        Each slot may be named once, with at least one id. For the slots in `all_logits` the logits
        are (n, V), after each id. The arrays are overwritten by the next read.
        """

    def sample(self, inputs: Sequence[SamplingInput]) -> list[NextToken | UserError]:
        """Sample a token for each, or return the error why none can be chosen."""

    def score_targets(
        self, logits: Logits, targets: Sequence[int], n_tokens: int
    ) -> tuple[list[float], list[int]]:
        """Return the logprob of each target after logits (n, V), and its rank, 1 for the likeliest.

        Logprobs are the model's own, over all V rows. Ranks are among the ids that may be chosen,
        those below `n_tokens`.
        """


class Runner(Protocol):
    """A model that is ready to compute."""

    @property
    def config(self) -> GPTConfig:
        """The model's config."""

    def use_caller_threads(self) -> None:
        """Note torch's settings in the calling thread, which submits a request."""

    def session(self, *, n_slots: int, capacity: int) -> Session:
        """Return a session of empty slots.

        On a CPU, memory is taken when slots are filled. Raises `NoRoomError` for more than exists.
        """


def require_memory(n_bytes: int, what: str, free: int | None = None) -> None:
    """Raise `NoRoomError` if fewer than `n_bytes` are free; `free` replaces the measurement."""
    free = free_memory() if free is None else free
    if free is not None and n_bytes > free:
        raise memory_error(n_bytes, what, free)


def memory_error(n_bytes: int, what: str, free: int | None = None) -> NoRoomError:
    """Return the error that says how much is missing."""
    free = free_memory() if free is None else free
    available = "" if free is None else f" and {free / 1e9:.2f} GB are free"
    return NoRoomError(
        f"{what} takes {n_bytes / 1e9:.2f} GB of memory{available}",
        hint="use fewer sequences at a time, or shorter ones",
    )
