"""The thread that runs an engine's scheduler, and the handles of its requests."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from textwrap import shorten
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.infer.scheduler import Request, RequestStatus, RequestTimes, Scheduler
from tiedgpt.infer.sequence import Completion, Token
from tiedgpt.infer.session import Runner

QUEUE_SIZE = 256
"""Requests that may wait for a slot."""


class QueueFullError(UserError):
    """Too many requests wait: try again later."""


class ClosedError(UserError):
    """The engine was closed."""


class Generation:
    """The handle of a request: iterate over its tokens, or wait for its result.

    `times` has the times at which the request got its slots, had its first token, and ended. The
    request is cancelled when its handle is garbage collected.
    """

    def __init__(
        self,
        cancel: Callable[[], None],
        tokens: SimpleQueue[Token | None],
        owner: object,
        times: RequestTimes,
    ) -> None:
        self.times = times
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled
        self.tokens = tokens
        self._owner = owner  # the engine lives as long as its generations
        # Finalizers are held globally, and a failed request's traceback may hold this object.
        self._cancel = weakref.finalize(self, cancel)
        self._cancel.atexit = False

    def __iter__(self) -> Iterator[Token]:
        """Yield each token when its text is certain."""
        return self

    def __next__(self) -> Token:
        """Wait for the next token; raise the error of a request that failed."""
        token = self.tokens.get()
        if token is None:
            self.tokens.put(None)
            self.result()
            raise StopIteration
        return token

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the `Completion` (`Scored` for `score`); raise the error of a failed request.

        Raises `TimeoutError` if it takes longer than `timeout` seconds; the request goes on.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the request; its result is the text so far."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.future.done()

    def __repr__(self) -> str:
        if not self.done:
            state = "running"
        elif self.future.cancelled():
            state = "cancelled"
        elif (error := self.future.exception()) is not None:
            state = f"failed, {shorten(str(error), 80)}"
        elif isinstance(result := self.result(), Completion):
            text = shorten(result.text, 60, placeholder=" ...")
            state = f"{result.finish_reason} after {len(result.ids)} tokens, {text!r}"
        else:
            state = "done"
        return f"<Generation: {state}>"


class Worker:
    """The queue of an engine's requests, and the thread that runs commands and steps in turn.

    The first request starts the thread, also after a fork. It holds no reference to the engine, so
    that an engine is closed when it is garbage collected.
    """

    def __init__(self, runner: Runner, n_slots: int, queue_size: int, is_fixed: bool) -> None:
        self._runner, self._n_slots, self._is_fixed = runner, n_slots, is_fixed
        self._max_requests = n_slots + queue_size
        self._lock = threading.Lock()
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._forget_requests()

    def _forget_requests(self) -> None:
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._scheduler: Scheduler | None = None
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._vacancies = threading.Semaphore(self._max_requests)
        self._active: dict[Request, tuple[Future[Any], SimpleQueue[Token | None]]] = {}

    def submit(
        self,
        request: Request,
        *,
        wait: bool,
        tokens: SimpleQueue[Token | None] | None = None,
        owner: object = None,
    ) -> Generation:
        """Send a request to the thread; if the queue is full, wait or raise `QueueFullError`.

        The generation yields from `tokens`, and keeps `owner` alive.
        """
        with self._lock:
            self._require_open()
            if self._process != os.getpid():
                self._forget_requests()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tiedgpt-engine", daemon=True)
                thread.start()
                self._thread = thread
        if threading.current_thread() is self._thread:
            raise UserError("a processor cannot use the engine that runs it")
        if not self._vacancies.acquire(blocking=wait):
            raise QueueFullError(
                f"{self._max_requests} requests run or wait: try again later, or "
                "Engine(..., queue_size=)"
            )
        self._runner.use_caller_threads()
        cancel = partial(self._cancel, weakref.ref(request))
        generation = Generation(cancel, tokens or SimpleQueue(), owner, request.times)
        with self._lock:
            if self._closed:
                self._vacancies.release()  # for others that wait
            self._require_open()
            self._counts["requests"] += 1
            self._commands.put(partial(self._add, request, generation.future, generation.tokens))
        return generation

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine was closed")

    def close(self) -> None:
        """End all requests and the thread."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            if was_closed or self._thread is None or self._process != os.getpid():
                return
            self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> dict[str, float]:
        """Return counts; see `Engine.stats`."""
        counts, requests, scheduler = self._counts, list(self._active), self._scheduler
        names = ("prompt_tokens", "reused_tokens", "generated_tokens")
        running = sum(request.status is not RequestStatus.WAITING for request in requests)
        return {
            "requests": counts["requests"],
            "running": running,
            "waiting": len(requests) - running,
            "cache_usage": 0.0 if scheduler is None else scheduler.cache_usage(),
            **{name: counts[name] for name in names},
            "seconds": counts["nanoseconds"] / 1e9,
        }

    def _cancel(self, reference: weakref.ref[Request]) -> None:
        """End a request soon, from any thread; its result is the text so far."""
        request = reference()
        if request is not None and self._process == os.getpid():
            self._commands.put(partial(self._end, request))

    def _run(self) -> None:
        """Alternate between commands and steps; a command of None ends the thread."""
        while self._run_commands():
            if self._scheduler is not None:
                began = time.perf_counter_ns()
                try:
                    self._scheduler.step()
                except Exception as error:  # not of a request: the scheduler itself failed
                    self._scheduler = None
                    for request in self._active:
                        request.fail(error)
                self._counts["nanoseconds"] += time.perf_counter_ns() - began
            ended = [r for r in self._active if r.status is RequestStatus.ENDED]
            for request in ended:
                self._deliver(request)
            if not self._active and not self._is_fixed:
                self._scheduler = None
        for request in list(self._active):
            self._end(request)
        self._scheduler = None

    def _run_commands(self) -> bool:
        """Run the queued commands; sleep while no request is active. Return False for None."""
        with suppress(Empty):
            while (command := self._commands.get(block=not self._active)) is not None:
                command()
            return False
        return True

    def _add(
        self, request: Request, future: Future[Any], tokens: SimpleQueue[Token | None]
    ) -> None:
        """Give a request to the scheduler. This is a command."""
        self._active[request] = future, tokens
        try:
            if self._scheduler is None:
                capacity = self._runner.config.n_positions
                session = self._runner.session(n_slots=self._n_slots, capacity=capacity)
                self._scheduler = Scheduler(session, self._counts)
        except Exception as error:
            request.fail(error)
        else:
            self._scheduler.add(request)

    def _end(self, request: Request) -> None:
        """Cancel a request unless its result was delivered. This is a command."""
        if request in self._active:
            if self._scheduler is not None:
                self._scheduler.cancel(request)
            request.end("cancelled")
            self._deliver(request)

    def _deliver(self, request: Request) -> None:
        """Deliver the result or error of a request that has ended."""
        future, tokens = self._active.pop(request)
        self._vacancies.release()
        if request.error is not None:
            future.set_exception(request.error)
        elif request.result is None:
            future.set_exception(ClosedError("the request was cancelled"))
        else:
            future.set_result(request.result)
        tokens.put(None)
