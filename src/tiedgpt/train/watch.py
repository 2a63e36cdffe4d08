"""What each process of a run is doing, so that one that hangs or dies ends the job by its name.

A thread in each process tells what the main thread does, and since when, in the store by which the
processes met. The first process reads what all others tell, and they what the first one tells:

- a process is lost that tells nothing new for `SILENCE` seconds: it was killed or stopped, or its
  machine cannot be reached;
- a process hangs that is in a phase for longer than this may take. Where others wait for it, it is
  the one that has entered the fewest phases.

Then the thread says so and ends its process. torchrun ends the others; with --max-restarts it
starts all of them again, and they go on from the newest checkpoint. Where the thread itself cannot
go on, since Python is blocked or the store out of reach, `faulthandler` ends the process and shows
its stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tiedgpt.errors import TiedGPTError

TIMEOUT = 600.0
"""Seconds that a phase of a step may take, where nothing else is asked for."""
SLOW = 6
"""Evaluations and checkpoints may take so many times as long."""
LENIENCE = 10
"""Any phase may take so many times as long as the longest of its name before it."""
SILENCE = 60.0
"""Seconds without news after which a process is lost."""
MISSED = 4
"""News that are missed by a process that has ended, where a connection to it broke."""
RESUMES = "the same command goes on from the newest checkpoint, as torchrun --max-restarts does"
POLL = 0.02
"""Seconds between looks for processes that are to come."""


@dataclass(frozen=True)
class Phase:
    """What a main thread does."""

    what: str
    step: int | None = None
    """The step that was begun last."""
    number: int = 0
    """Phases that were entered before."""
    limit: float = math.inf
    """Seconds that it may take."""
    began: float = field(default_factory=time.monotonic)


class News(NamedTuple):
    """What a process tells."""

    beat: int
    """News before this."""
    what: str
    number: int
    seconds: float
    """In this phase."""
    limit: float
    has_left: bool = False
    why: str = ""
    """The error with which it left."""


def meet(store: Any, rank: int, size: int, timeout: float) -> str:
    """Return a name that these processes, and none before them, have in common: all are there.

    The store of torchrun outlives a restart, with what earlier processes wrote. So each writes a
    word of its own; the first collects them, and goes on when each has confirmed that it read its
    own. Raises `TiedGPTError` with the ranks that do not come in `timeout` seconds.
    """

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    own, give_up = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"word/{rank}", own)
    while True:
        if rank == 0:
            words = ",".join(read(f"word/{n}") for n in range(size))
            store.set("words", words)
            missing = [n for n in range(1, size) if read(f"confirmed/{n}") != words]
            if not missing:
                store.set("complete", words)
        else:
            words, missing = read("words"), [0]
            if own in words:
                store.set(f"confirmed/{rank}", words)
        if own in words and read("complete") == words:
            return words.partition(",")[0]
        if time.monotonic() > give_up:
            raise TiedGPTError(
                f"{_name(missing)} did not start within {timeout:,.0f} s",
                hint="see what those processes do, or give a longer --timeout",
            )
        time.sleep(POLL)


class Watch:
    """The thread of one of `size` processes that met by a `name`; `timeout` is in seconds."""

    def __init__(self, name: str, host: str, port: int, rank: int, size: int, timeout: float):
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._store = PrefixStore(f"{name}/watch", store)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._every, self._silence = min(1.0, timeout / 10), min(SILENCE, timeout)
        self._phase, self._longest = Phase("starting", limit=timeout), dict[str, float]()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._beat = 0
        self._is_asked, self._verdict = False, ""
        self._has_verdict, self._ended = threading.Event(), threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def enter(self, what: str, *, step: int | None = None, times: float = 1) -> None:
        """Begin a phase, which may take so many `times` the timeout."""
        before, now = self._phase, time.monotonic()
        self._longest[before.what] = max(now - before.began, self._longest.get(before.what, 0.0))
        limit = max(times * self._timeout, LENIENCE * self._longest.get(what, 0.0))
        step = before.step if step is None else step
        self._phase = Phase(what, step, before.number + 1, limit, now)

    def find_lost(self) -> str:
        """Return which process has ended and what it did, when that is plain; "" where none has.

        It is for when a connection broke: then news that are late by a few beats are enough.
        """
        self._silence, self._is_asked = min(self._silence, MISSED * self._every), True
        self._has_verdict.wait(2 * MISSED * self._every + 1)
        return self._verdict

    def is_first_to_tell(self) -> bool:
        """Whether no other process tells what is wrong."""
        with contextlib.suppress(RuntimeError):
            return self._store.add("told", 1) == 1
        return True

    def stop(self, why: str = "") -> None:
        """Leave, with an error or without; others no longer wait for news of this process."""
        self._ended.set()
        self._thread.join(5)
        with contextlib.suppress(RuntimeError):
            self._tell(has_left=True, why=why)

    def _tell(self, *, has_left: bool = False, why: str = "") -> News:
        phase, self._beat = self._phase, self._beat + 1
        seconds = time.monotonic() - phase.began
        what = phase.what if phase.step is None else f"{phase.what}, step {phase.step:,}"
        news = News(self._beat, what, phase.number, seconds, phase.limit, has_left, why)
        self._store.set(str(self._rank), json.dumps(news))
        return news

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            faulthandler.dump_traceback_later(2 * self._silence + 10, exit=True, file=2)
            try:
                verdict = self._look()
            except RuntimeError as error:
                if self._ended.wait(self._silence):
                    break
                verdict = f"the other processes are out of reach: {str(error).splitlines()[0]}"
            if verdict:
                self._verdict = verdict
                self._has_verdict.set()
                if not self._is_asked:
                    self._end_process()
                break
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> str:
        """Tell the news and read those of others; return who is lost or hangs, or "" ."""
        every, now = {self._rank: self._tell()}, time.monotonic()
        for rank in range(1, self._size) if self._rank == 0 else [0]:
            text = self._store.get(str(rank))
            if self._heard.get(rank, (b"", 0.0))[0] != text:
                self._heard[rank] = text, now
            every[rank] = news = News(*json.loads(text))
            silent = now - self._heard[rank][1]
            if news.has_left:
                if news.why and self._is_asked:
                    return f"rank {rank} has ended: {news.why}"
                del every[rank]
            elif silent > self._silence:
                return f"rank {rank} is lost, without news for {silent:,.0f} s: last in {news.what}"
        if self._rank == 0 and any(news.seconds > news.limit for news in every.values()):
            least = min(news.number for news in every.values())
            behind = [rank for rank, news in sorted(every.items()) if news.number == least]
            news = every[behind[0]]
            return f"{_name(behind)} hangs in a phase of {news.seconds:,.0f} s: {news.what}"
        return ""

    def _end_process(self) -> None:
        if self.is_first_to_tell():
            os.write(2, f"\nerror: {self._verdict}\nhint: {RESUMES}\n".encode())
        os._exit(TiedGPTError.exit_code)


def _name(ranks: list[int]) -> str:
    """Return the processes in words; of several, none of which is behind the others, all."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {', '.join(map(str, ranks))}"
