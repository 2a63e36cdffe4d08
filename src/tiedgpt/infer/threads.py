"""How many threads compute: ours by session, torch's by process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex, cast

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.session import Logits, Runner, Session

USUAL = 16
"""Threads beyond this only wait for memory, where one token is read at a time."""
MOST = 256


def default_threads() -> int:
    """Return how many cores this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(USUAL, cores or 1))


def check_threads(threads: object) -> int:
    """Return a number of threads, 1 to 256; anything else is a `UserError`."""
    if isinstance(threads, SupportsIndex) and not isinstance(threads, bool):
        number = threads.__index__()
        if 1 <= number <= MOST:
            return number
    raise UserError(f"threads={threads!r} is no number of threads from 1 to {MOST}")


class OnThreads:
    """A runner of torch's that computes on a number of threads.

    torch has one number of threads for the process: it is set while a session reads, and put back
    after. Sessions that read at the same time in several threads of Python should ask for the same.
    """

    def __init__(self, runner: Runner, threads: int) -> None:
        self.threads = threads
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        if name == "_runner":  # asked for while a copy is made
            raise AttributeError(name)
        return getattr(self._runner, name)

    @property
    def config(self) -> GPTConfig:
        """The model's."""
        return self._runner.config

    def session(self, *, slots: int, capacity: int) -> Session:
        """Allocate room for sequences; see `Runner`."""
        with using(self.threads):
            session = self._runner.session(slots=slots, capacity=capacity)
        return cast(Session, _SessionOnThreads(session, self.threads))


class _SessionOnThreads:
    """See `OnThreads`."""

    def __init__(self, session: Session, threads: int) -> None:
        self._session, self._threads = session, threads

    def __getattr__(self, name: str) -> Any:
        if name == "_session":
            raise AttributeError(name)
        return getattr(self._session, name)

    def read(self, *given: Any, **options: Any) -> list[Logits]:
        with using(self._threads):
            return self._session.read(*given, **options)


_lock = threading.Lock()
_using: list[int] = []
"""What torch was set to before, once for each that uses another number now."""


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Have torch compute on so many threads inside the block."""
    import torch

    with _lock:
        before = _using[0] if _using else torch.get_num_threads()
        _using.append(before)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        with _lock:
            _using.pop()
            torch.set_num_threads(before)
