"""The threads that take part in a step: the caller's own, and helpers that sleep between steps.

What can fail, fails before a thread takes a chunk: kernels are compiled on the caller's thread
before helpers are given anything, and each phase allocates what it needs before it takes chunks. A
thread that fails thus leaves a step that the others can finish, and is there for the next.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from numba.core.caching import NullCache

from tiedgpt.infer.kernels.forward import forward, phases_of
from tiedgpt.infer.kernels.queue import control_for

BEHIND = 8
"""Steps that may wait for a helper that does not come."""


class Crew:
    """Runs steps of one model on several threads, one step at a time.

    Each step has a control of its own, so that a helper that comes late to one that is over cannot
    meddle with the next.
    """

    def __init__(self, n_layer: int, threads: int) -> None:
        self._phases = phases_of(n_layer)
        self._helpers = threads - 1
        self._process: int | None = None
        self._compiled = False
        self._unfinished: tuple[Any, ...] | None = None
        self._work: list[SimpleQueue[Any]] = []
        weakref.finalize(self, _dismiss, self._work)

    def run(self, *arguments: Any) -> None:
        """Do a step: `forward` of these arguments.

        Raises `MemoryError`; the step is then finished before the next, and what it has written to
        the cache is not to be relied upon until then.
        """
        self.settle()
        if not self._compiled:
            over = control_for(self._phases, 1 + self._helpers)
            over.counters[0] = 1
            _compile(over, *arguments)
            self._compiled = True
        control = control_for(self._phases, 1 + self._helpers)
        self._unfinished = (control, *arguments)
        for number, queue in enumerate(self._work, 1):
            if queue.qsize() < BEHIND:
                queue.put((control._replace(me=number), *arguments))
        forward(control, *arguments)
        self._unfinished = None

    def settle(self) -> None:
        """Finish a step that an error or Ctrl-C cut short, as helpers may still be at it."""
        if self._process != os.getpid():  # the first step; or forked: threads are not, nor chunks
            self._work[:], self._unfinished = _begun(self._helpers), None
            self._process = os.getpid()
        if self._unfinished is not None:
            forward(*self._unfinished)
            self._unfinished = None


def _compile(*over: Any) -> None:
    """Have `forward` compiled, or read from disk, by a step that is over.

    Kernels that cannot be read or kept there (a full disk, a damaged file) are compiled for this
    process alone, and a `RuntimeWarning` says so.
    """
    try:
        forward(*over)
    except Exception as error:
        where = forward.stats.cache_path
        if where is None:
            raise
        if not isinstance(error, OSError):
            with suppress(OSError):  # what is damaged is not read again
                forward._cache.flush()
        forward._cache = NullCache()
        forward(*over)
        warnings.warn(
            f"kernels cannot be read from or kept in {where} ({error}): they were compiled for "
            "this process alone; if the next says so too, free room there or set NUMBA_CACHE_DIR",
            RuntimeWarning,
            stacklevel=1,
        )


def _begun(n: int) -> list[SimpleQueue[Any]]:
    """Start n helpers, or as many as the system lets; return where each takes its work."""
    queues: list[SimpleQueue[Any]] = []
    with suppress(RuntimeError):  # no more threads, or the interpreter is ending
        for _ in range(n):
            queue: SimpleQueue[Any] = SimpleQueue()
            threading.Thread(target=_help, args=(queue,), daemon=True).start()
            queues.append(queue)
    return queues


def _help(queue: SimpleQueue[Any]) -> None:
    while (work := queue.get()) is not None:
        with suppress(Exception):  # no chunk was taken: the others take them
            forward(*work)
        del work


def _dismiss(queues: list[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)
