"""The threads that take part in a step: the caller's own, and helpers that sleep between steps."""

from __future__ import annotations

import os
import threading
import weakref
from queue import SimpleQueue
from typing import Any

from tiedgpt.infer.kernels.forward import control_for, forward

MOST = 16
"""Threads beyond this only wait for memory."""
BEHIND = 8
"""Steps that may wait for a helper: after a fork there is none to take them."""


def default_threads() -> int:
    """Return how many cores this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST, cores or 1))


class Crew:
    """Runs steps of one model on several threads, one step at a time.

    Each step has a control of its own, so that a helper that comes late to one that is over cannot
    meddle with the next.
    """

    def __init__(self, n_layer: int, threads: int) -> None:
        self._n_layer = n_layer
        self._unfinished: tuple[Any, ...] | None = None
        self._work: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(threads - 1)]
        for queue in self._work:
            threading.Thread(target=_help, args=(queue,), daemon=True).start()
        weakref.finalize(self, _dismiss, self._work)

    def run(self, *arguments: Any) -> None:
        """Do a step: `forward` of these arguments."""
        if self._unfinished is not None:  # interrupted by Ctrl-C; helpers may still be at it
            forward(*self._unfinished)
        work = self._unfinished = (control_for(self._n_layer), *arguments)
        for queue in self._work:
            if queue.qsize() < BEHIND:
                queue.put(work)
        forward(*work)
        self._unfinished = None


def _help(queue: SimpleQueue[Any]) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        forward(*work)
        del work


def _dismiss(queues: list[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)
