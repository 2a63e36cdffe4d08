"""Word of kernels being compiled: once for each form of weights and machine, then kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.event import Listener, install_listener


class _First(Listener):
    """Tells of the first compilation."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: Any) -> None:
        if self._tell is not None:
            self._tell()
            self._tell = None

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def telling_of_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when, inside the block, kernels begin to be compiled; not if they were before."""
    with install_listener("numba:compile", _First(tell)):
        yield
