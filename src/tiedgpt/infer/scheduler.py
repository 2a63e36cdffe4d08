"""Continuous batching: requests that come and go in the slots of a session.

In each step every running request reads a chunk of its prompt, or its newest token;
then the next tokens of those that have read everything are chosen together. Requests take free
slots in the order of arrival; ids that a slot already holds are not read again. The result of a
request does not depend on other requests. A scheduler belongs to one thread.

Orca (Yu et al. 2022) is the paper on scheduling by steps, vLLM (Kwon et al. 2023) on prefix reuse.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from tiedgpt.errors import NoRoomError
from tiedgpt.infer.sampling import Choice
from tiedgpt.infer.sequence import FinishReason, SequenceState
from tiedgpt.infer.session import Session
from tiedgpt.infer.slots import Read, SlotPool, Steps, common_prefix

PREFILL_TOKENS = 256
"""Prompt tokens that are read in a step if no sequence decodes.

A request can be cancelled between steps. Steps of 512 read 1.2 % faster, but take twice as long.
"""
LEAST_CHUNK, FIRST_CHUNK = 8, 32
"""Prompt tokens that are read in a step beside sequences that decode: the least, and at first."""
SLOWDOWN = 2.0
"""How many times longer a step may take if it also reads part of a prompt."""
MIN_SHARED = 32
"""A request waits until another has read their common prefix if that saves so many tokens."""


class RequestStatus(Enum):
    """The stages of a request."""

    WAITING = auto()
    """It has no slots."""
    PREFILL = auto()
    """Its prompt is being read."""
    READY = auto()
    """Its prompt was read, and none of its new tokens."""
    DECODE = auto()
    """It reads its new tokens."""
    ENDED = auto()
    """It has a result or an error."""


class Request:
    """A generator of `Read`s that a scheduler runs in `n_slots` slots, and its result.

    Each slot is filled up to at most `length` positions. `prompt` are the first ids of the first
    slot, which may be reused; `sequence` is the text that is generated, if any.
    """

    def __init__(
        self,
        begin: Callable[[SlotPool, list[int]], Steps[Any]],
        *,
        n_slots: int = 1,
        length: int = 0,
        prompt: Sequence[int] = (),
        sequence: SequenceState | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.n_slots, self.length, self.prompt = n_slots, length, prompt
        self.sequence, self.deadline = sequence, deadline
        self.status = RequestStatus.WAITING
        self.result: Any = None
        self.error: Exception | None = None
        self.reads: list[Read] = []
        """The reads that must be done before it goes on."""
        self.slot_ids: list[int] = []
        self.created = time.monotonic()
        self.ready = math.inf
        """The time at which it became READY."""
        self._begin = begin
        self._steps: Steps[Any] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it has a result or an error."""
        return self.status is RequestStatus.ENDED

    @property
    def is_decode(self) -> bool:
        """Whether it reads new tokens only."""
        return all(read.is_decode for read in self.reads)

    @property
    def is_read(self) -> bool:
        """Whether all its reads are done."""
        return bool(self.reads) and not any(read.n_left for read in self.reads)

    def begin(self, pool: SlotPool, slot_ids: list[int]) -> None:
        """Start in these slots."""
        self.status, self.slot_ids = RequestStatus.PREFILL, slot_ids
        self._steps = self._begin(pool, slot_ids)
        self.advance()

    def advance(self) -> None:
        """Go on to the next `reads`. An exception becomes this request's error."""
        if self._steps is None or self.status is RequestStatus.ENDED:
            return
        try:
            self.reads = next(self._steps)
        except StopIteration as end:
            self.status, self.result, self.reads = RequestStatus.ENDED, end.value, []
        except BaseException as error:
            self.fail(error)
        if self.status is RequestStatus.PREFILL and self.is_decode:
            self.status, self.ready = RequestStatus.READY, time.monotonic()

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended; SystemExit is replaced by RuntimeError."""
        if self.status is not RequestStatus.ENDED:
            if not isinstance(error, Exception):
                error = RuntimeError(f"a request raised {error!r}")
            self.error = error
            self.end("error")

    def end(self, reason: FinishReason) -> None:
        """End now, with the text so far as the result."""
        if self.status is RequestStatus.ENDED:
            return
        self.status, self.reads = RequestStatus.ENDED, []
        if self._steps is not None:
            self._steps.close()
        if self.sequence is not None:
            self.sequence.finish(reason)
            self.result = self.sequence.completion(self.error)


Part = tuple[Request, Read, int]
"""A request, one of its reads, and how many ids of that are read in this step."""


class Scheduler:
    """Runs requests in the slots of a session."""

    def __init__(self, session: Session, counts: Counter[str] | None = None) -> None:
        self.session = session
        self.pool = SlotPool(session)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counter() if counts is None else counts
        """Counts of tokens, as in `Engine.stats`."""
        self._pace = _Pace()

    def add(self, request: Request) -> None:
        """Put a request in the queue."""
        self.waiting.append(request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request now and free its slots."""
        request.end(reason)
        if request in self.waiting:
            self.waiting.remove(request)
        self._release_ended()

    def step(self) -> None:
        """Do one step: admit requests, schedule reads, read, choose tokens, advance requests.

        An exception of the computation ends the requests that took part in it.
        """
        now = time.monotonic()
        for request in [r for r in (*self.waiting, *self.running) if r.deadline < now]:
            self.cancel(request, "timeout")
        if self.waiting:
            self._admit()
        if parts := self._schedule():
            try:
                self._read(parts)
            except Exception as error:
                for request in {request: None for request, _, _ in parts}:
                    request.fail(error)
                    for slot_id in request.slot_ids:
                        self.pool.truncate(slot_id, 0)
            ready = [request for request in self.running if request.is_read]
            self._choose(ready)
            for request in ready:
                request.advance()
        self._release_ended()

    def _admit(self) -> None:
        """Give free slots to the requests that have waited longest.

        No request takes a slot that an earlier one waits for. If another request is reading the
        prefix of one, that one waits, its slots stay free, and later requests may pass it.
        """
        n_free = len(self.pool.free)
        for request in list(self.waiting):
            n_free -= request.n_slots
            if n_free < 0:
                break
            if self._is_being_read(request.prompt):
                continue
            self.waiting.remove(request)
            try:
                taken = self.pool.take(request.n_slots, request.prompt, request.length)
            except NoRoomError as error:
                request.fail(error)
                continue
            slot_ids, n_shared = taken
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["reused_tokens"] += n_shared
            self.running.append(request)
            request.begin(self.pool, slot_ids)
        self._release_ended()

    def _is_being_read(self, prompt: Sequence[int]) -> bool:
        """Whether a running request is reading more of this prompt than any slot holds."""
        n_shared = 0
        for request in self.running:
            if request.prompt and not request.is_decode:
                n_shared = max(n_shared, common_prefix(request.prompt, prompt[:-1]))
        n_held = self.pool.longest_prefix(prompt)[1]
        return n_shared >= MIN_SHARED and n_shared >= n_held + MIN_SHARED

    def _schedule(self) -> list[Part]:
        """Return the parts that are read in this step: new tokens first, then chunks of prompts.

        Prompts that came together are all read before the first of their texts goes on. Texts that
        are scored, which may be long, delay no sequence.
        """
        decoding, prompts = list[Part](), list[Part]()
        for request in self.running:
            for read in request.reads:
                if read.n_left:
                    (decoding if read.is_decode else prompts).append((request, read, read.n_left))
        newest = max((r.created for r, _, _ in prompts if r.sequence), default=math.inf)
        came_together = (
            r.status is RequestStatus.READY and r.ready > newest for r, _, _ in decoding
        )
        if prompts and all(came_together):
            decoding = []
        room = self._pace.chunk if decoding else PREFILL_TOKENS
        for request, _, _ in decoding:
            request.status = RequestStatus.DECODE
        for request, read, n_left in prompts:
            if n := min(room, n_left):
                decoding.append((request, read, n))
                room -= n
        return decoding

    def _read(self, parts: list[Part]) -> None:
        """Read all parts in one call, and note the time."""
        began = time.perf_counter()
        slot_ids = [read.slot_id for _, read, _ in parts]
        ids = [read.ids[len(read.ids) - read.n_left :][:n] for _, read, n in parts]
        every = {read.slot_id for _, read, _ in parts if read.every}
        logits = self.session.read(slot_ids, ids, every=every)
        for (_, read, n), new, its in zip(parts, ids, logits, strict=True):
            self.pool.cached_ids[read.slot_id] += new
            read.add(n, its)
        for request, read, _ in parts:
            if read.logits is not None and any(other.n_left for other in request.reads):
                read.logits = read.logits.copy()
        self._learn(parts, time.perf_counter() - began)

    def _learn(self, parts: list[Part], seconds: float) -> None:
        """Record the time of a step."""
        n_decode = sum(read.is_decode for _, read, _ in parts)
        if n_decode < len(parts):
            prompts = sum(n for _, read, n in parts if not read.is_decode)
            self._pace.note_mixed(seconds, prompts, n_decode)
        else:
            self._pace.note_plain(seconds)

    def _choose(self, requests: list[Request]) -> None:
        """Choose the next token of each read that has a sequence."""
        asked, choices = list[tuple[Request, Read]](), list[Choice]()
        for request in requests:
            for read in request.reads:
                if read.sequence is None:
                    continue
                try:
                    choices.append(read.sequence.choice(read.next_logits))
                    asked.append((request, read))
                except BaseException as error:  # of a processor: this request's alone
                    request.fail(error)
        if not choices:
            return
        try:
            for (_, read), chosen in zip(asked, self.session.choose(choices), strict=True):
                read.next_token = chosen
        except Exception as error:
            for request, _ in asked:
                request.fail(error)

    def _release_ended(self) -> None:
        """Free the slots of requests that have ended."""
        for request in [request for request in self.running if request.has_ended]:
            self.running.remove(request)
            self.pool.release(request.slot_ids)
            if request.sequence is not None:
                self.counts["generated_tokens"] += len(request.result.ids)


class _Pace:
    """Decides by measured times how many prompt tokens are read beside sequences that decode."""

    def __init__(self) -> None:
        self.chunk = FIRST_CHUNK
        self._plain: float | None = None

    def note_plain(self, seconds: float) -> None:
        """Record the time of a step that only decoded."""
        before = seconds if self._plain is None else self._plain
        self._plain = before + 0.2 * (min(seconds, 2 * before) - before)

    def note_mixed(self, seconds: float, n_tokens: int, n_decode: int) -> None:
        """Record the time of a step that also read `n_tokens` of prompts."""
        if self._plain is None or not n_decode:
            return
        a_token = max(seconds - self._plain, 1e-9) / n_tokens
        fits = (SLOWDOWN - 1) * self._plain / a_token
        fits = min(fits, 2 * self.chunk)  # one fast step does not count too much
        self.chunk = max(LEAST_CHUNK, min(PREFILL_TOKENS, int(fits)))
