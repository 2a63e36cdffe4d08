"""The threads that take part in a step: the caller's own, and helpers that sleep between steps."""

from __future__ import annotations

import os
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import numpy as np

from tiedgpt.infer.kernels.forward import INSIDE, STEP, forward, phases
from tiedgpt.infer.kernels.queue import LINE

MOST = 16
"""Threads beyond this only wait for memory."""


def default_threads() -> int:
    """Return how many cores this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST, cores or 1))


class Crew:
    """Runs steps of one model on several threads, one step at a time."""

    def __init__(self, n_layer: int, threads: int) -> None:
        self._control = np.zeros(phases(n_layer) * LINE, np.int64)
        self._gate = np.zeros(2 * LINE, np.int64)
        self._step = 0
        self._work: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(threads - 1)]
        for queue in self._work:
            threading.Thread(target=_help, args=(queue,), daemon=True).start()
        weakref.finalize(self, _dismiss, self._work)

    def run(self, *arguments: Any) -> None:
        """Do a step: `forward` of these arguments."""
        control, gate = self._control, self._gate
        gate[STEP] = -1
        while gate[INSIDE]:  # a helper that comes late to the last step, and is about to leave
            pass
        control[:] = 0
        self._step += 1
        gate[STEP] = self._step
        work = (control, gate, self._step, *arguments)
        for queue in self._work:
            queue.put(work)
        forward(*work)


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
