"""How many threads compute: a session has its own number, torch one for the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsIndex

from tiedgpt.errors import UserError
from tiedgpt.runtime import count_cores

USUAL = 16
"""More threads do not help when one token is read at a time: memory is the limit."""
MOST = 256


def default_threads() -> int:
    """Return how many cores this process may use, at most 16."""
    return min(USUAL, count_cores())


def check_threads(threads: object) -> int:
    """Return a number of threads, 1 to 256; anything else is a `UserError`."""
    if isinstance(threads, SupportsIndex) and not isinstance(threads, bool):
        number = threads.__index__()
        if 1 <= number <= MOST:
            return number
    raise UserError(f"must be an integer from 1 to {MOST}, got {threads!r}", option="threads")


_lock = threading.Lock()
_before: list[int] = []
"""For each block that runs now, the number of threads that torch was set to before."""


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads inside the block."""
    import torch

    with _lock:
        before = _before[0] if _before else torch.get_num_threads()
        _before.append(before)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        with _lock:
            _before.pop()
            torch.set_num_threads(before)
