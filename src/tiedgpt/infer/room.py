"""Checks that there is enough memory before it is taken."""

from __future__ import annotations

from tiedgpt.errors import NoRoomError
from tiedgpt.runtime import free_memory


def require_memory(n_bytes: int, what: str, free: int | None = None) -> None:
    """Raise `NoRoomError` if fewer bytes are free: `free`, or else what the system reports."""
    free = free_memory() if free is None else free
    if free is not None and n_bytes > free:
        raise no_room(n_bytes, what, free)


def no_room(n_bytes: int, what: str, free: int | None = None) -> NoRoomError:
    """Return the error that says how much is missing."""
    free = free_memory() if free is None else free
    known = "" if free is None else f" and {free / 1e9:.2f} GB are free"
    return NoRoomError(
        f"{what} takes {n_bytes / 1e9:.2f} GB of memory{known}",
        hint="use fewer sequences at a time, or shorter ones",
    )
