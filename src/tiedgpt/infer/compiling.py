"""Word of kernels being compiled: once for each form of weights and machine, then kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def telling_of_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when, inside the block, kernels begin to be compiled; not if they were before.

    A Numba that has no such events compiles all the same, and nothing is told.
    """
    try:
        from numba.core.event import Listener, install_listener
    except ImportError:
        yield
        return

    class First(Listener):
        """Tells of the first compilation."""

        told = False

        def on_start(self, event: Any) -> None:
            if not self.told:
                self.told = True
                tell()

        def on_end(self, event: Any) -> None:
            pass

    with install_listener("numba:compile", First()):
        yield


def where_kept() -> str | None:
    """Return the directory of compiled kernels; None where Numba found none that can be written."""
    from tiedgpt.infer.kernels.forward import forward

    return forward.cache_path
