"""The threads that take part in a step: the caller's own, and helpers that sleep between steps.

Errors happen before a thread claims a chunk: kernels are compiled or loaded on the caller's thread
before helpers get a step, and they allocate nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.infer.kernels.compile_cache import Kernel, Step

BEHIND = 8
"""Steps that may wait in the queue of a helper that is late."""


class ThreadPool:
    """Runs the steps of kernels on several threads, one step at a time.

    Each step has a control of its own, so that a helper that comes late, when its step is over,
    cannot disturb the next.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._process: int | None = None
        self._unfinished: tuple[Step, Any] | None = None
        self._scratch: NDArray[np.float32] = np.zeros((threads, 0, 0), np.float32)
        self._work: list[SimpleQueue[Any]] = []
        weakref.finalize(self, _dismiss, self._work)

    def run(
        self,
        kernel: Kernel,
        phases: int,
        *arguments: Any,
        chunks: int | None = None,
        alive: Any = None,
    ) -> None:
        """Do a step: call a kernel of so many phases with a control and these arguments.

        At most `chunks` threads take part. `alive` owns memory that the arguments point to. After
        an error, as `MemoryError`, the step is finished before the next, and its results must not
        be used until then.
        """
        self.finish_step()
        step = Step(kernel, phases, self.threads, arguments)
        self._unfinished = (step, alive)
        helpers = self._work if chunks is None else self._work[: max(0, chunks - 1)]
        for number, queue in enumerate(helpers, 1):
            if queue.qsize() < BEHIND:
                queue.put((step, number))
        step(0)
        self._unfinished = None

    def finish_step(self) -> None:
        """Finish a step that an error or Ctrl-C interrupted: helpers may still work on it."""
        if self._process != os.getpid():  # the first step, or the first in a forked process
            self._work[:], self._unfinished = _start_helpers(self.threads - 1), None
            self._process = os.getpid()
        if self._unfinished is not None:
            step, _ = self._unfinished
            step(0)
            self._unfinished = None

    def scratch(self, n: int, size: int) -> NDArray[np.float32]:
        """Return (threads, n, size) float32, or more, kept for later steps; they are 0 at first."""
        self.finish_step()
        _, old_n, old_size = self._scratch.shape
        if old_n < n or old_size < size:
            shape = (self.threads, max(n, old_n), max(size, old_size))
            self._scratch = np.zeros(shape, np.float32)
        return self._scratch


def _start_helpers(n: int) -> list[SimpleQueue[Any]]:
    """Start n helpers, or as many as the system allows; return the queue of each one's steps."""
    queues: list[SimpleQueue[Any]] = []
    with suppress(RuntimeError):  # no more threads, or the interpreter is ending
        for _ in range(n):
            queue: SimpleQueue[Any] = SimpleQueue()
            threading.Thread(target=_help, args=(queue,), daemon=True).start()
            queues.append(queue)
    return queues


def _help(queue: SimpleQueue[Any]) -> None:
    """Take part in steps until None comes."""
    while (work := queue.get()) is not None:
        step, number = work
        with suppress(Exception):  # it claimed no chunk: others claim them
            step(number)
        del work, step


def _dismiss(queues: list[SimpleQueue[Any]]) -> None:
    """End the helpers."""
    for queue in queues:
        queue.put(None)
