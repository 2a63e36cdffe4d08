"""Continuous batching: requests that come and go in the slots of a session.

In each step every running request runs a chunk of its prompt, or its newest token; then the next
tokens of those whose tokens have all run are sampled together. Requests take free slots in the
order of arrival; ids that a slot already holds are not run again. The result of a request does not
depend on other requests. A scheduler belongs to one thread.

Orca (Yu et al. 2022) is the paper on scheduling by steps, vLLM (Kwon et al. 2023) on prefix reuse.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import islice
from typing import Any

import numpy as np

from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.infer.prompts import common_prefix
from tiedgpt.infer.sampling import NextToken, SamplingInput
from tiedgpt.infer.sequence import FinishReason, SequenceState
from tiedgpt.infer.session import Logits, Session
from tiedgpt.infer.slots import Decoding, RunResult, SlotPool, TokensToRun

MIN_SHARED = 32
"""Length in tokens of a common prefix for which a request waits until another has run it."""


class PrefillBudget:
    """Number of prompt tokens that a step runs: `alone`, or `beside` sequences that decode.

    A step that decodes takes at most `slowdown` times longer, by measured times. No fixed number
    does as well: on two cores, 64 tokens beside 7 sequences make the median gap between tokens 1.6
    times longer than measured ones, and 32 beside one sequence 1.8 times.

    A request can be cancelled between steps. Steps of 512 run prompts 1.2 % faster than steps of
    256, but take twice as long.
    """

    MIN_BESIDE = 8

    def __init__(self, alone: int = 256, beside: int = 32, slowdown: float = 2.0) -> None:
        self.alone, self.beside, self._slowdown = alone, min(alone, beside), slowdown
        self._decode_seconds: float | None = None

    def record(self, seconds: float, n_prompt: int, n_decode: int) -> None:
        """Record the time of a step that only decoded, or did both; adjust `beside`."""
        average = self._decode_seconds
        if not n_prompt:
            average = seconds if average is None else average
            self._decode_seconds = average + 0.2 * (min(seconds, 2 * average) - average)
        elif n_decode and average is not None:
            seconds_per_token = max(seconds - average, 1e-9) / n_prompt
            fits = (self._slowdown - 1) * average / seconds_per_token
            fits = min(fits, 2 * self.beside)  # one fast step does not count too much
            self.beside = min(self.alone, max(self.MIN_BESIDE, int(fits)))


class RequestStatus(Enum):
    """The stages of a request."""

    WAITING = auto()
    """It has no slots."""
    PREFILL = auto()
    """Its prompt is being run."""
    READY = auto()
    """Its prompt has run, and none of its new tokens."""
    DECODE = auto()
    """Its new tokens are being run."""
    ENDED = auto()
    """It has a result or an error."""


@dataclass
class RequestTimes:
    """Times at which a request reached its stages, by `time.monotonic()`; None before."""

    created: float
    started: float | None = None
    """It got its slots."""
    first_token: float | None = None
    """Its prompt had run, and its first token was known."""
    ended: float | None = None


class Request:
    """A generator of `TokensToRun` that a scheduler runs in `n_slots` slots, and its result.

    Each slot is filled up to at most `length` positions. `prompt` are the first ids of the first
    slot, which may be reused; `sequence` is the text that is generated, if any.
    """

    def __init__(
        self,
        decoding: Callable[[SlotPool, list[int]], Decoding[Any]],
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
        self.to_run: list[TokensToRun] = []
        """Tokens to run before the generator goes on."""
        self.logits: list[Logits] = []
        """The requested logits of the tokens that have run."""
        self.slot_ids: list[int] = []
        self.times = RequestTimes(time.monotonic())
        self.ready = math.inf
        """The time at which it became READY."""
        self._start = decoding
        self._decoding: Decoding[Any] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether one token of each slot has to run."""
        return len(self.to_run[0].ids) == 1

    def begin(self, pool: SlotPool, slot_ids: list[int]) -> None:
        """Start in these slots."""
        self.status, self.slot_ids = RequestStatus.PREFILL, slot_ids
        self.times.started = time.monotonic()
        self._decoding = self._start(pool, slot_ids)
        self.advance(None)

    def chunk(self, max_tokens: int) -> list[TokensToRun]:
        """Return what runs next: at most `max_tokens` of a prompt, or the new tokens."""
        tokens = self.to_run[0]
        if self.is_decode or len(tokens.ids) <= max_tokens:
            return self.to_run
        return [replace(tokens, ids=tokens.ids[:max_tokens])]

    def receive(self, chunk: list[TokensToRun], logits: list[Logits]) -> bool:
        """Receive the logits of a chunk; return whether everything has run."""
        n_left = len(self.to_run[0].ids) - len(chunk[0].ids)
        if n_left:
            tokens = self.to_run[0]
            self.to_run = [replace(tokens, ids=tokens.ids[-n_left:])]
            if tokens.all_logits:  # the next step overwrites them
                self.logits.append(logits[0].copy())
        elif self.logits:
            self.logits = [np.concatenate([*self.logits, *logits])]
        else:
            self.logits = logits
        return not n_left

    def advance(self, results: Any) -> None:
        """Send results to the generator, None to start it; it yields the next `to_run`, or ends.

        An exception is this request's error.
        """
        if self._decoding is None or self.status is RequestStatus.ENDED:
            return
        if self.status is RequestStatus.READY:
            self.status = RequestStatus.DECODE
        if results and self.times.first_token is None:
            is_scored_part = results[0].next_token is None and self.to_run[0].all_logits
            self.times.first_token = None if is_scored_part else time.monotonic()
        self.logits = []
        try:
            self.to_run = self._decoding.send(results)
        except StopIteration as end:
            self.status, self.result, self.to_run = RequestStatus.ENDED, end.value, []
            self.times.ended = time.monotonic()
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
        self.status, self.to_run, self.logits = RequestStatus.ENDED, [], []
        self.times.ended = time.monotonic()
        if self._decoding is not None:
            self._decoding.close()
        if self.sequence is not None:
            self.sequence.finish(reason)
            self.result = self.sequence.completion(self.error)


StepBatch = list[tuple[Request, list[TokensToRun]]]
"""Requests, with the chunk of each that runs in a step."""


class Scheduler:
    """Runs requests in the slots of a session."""

    def __init__(
        self,
        session: Session,
        counts: Counter[str] | None = None,
        budget: PrefillBudget | None = None,
    ) -> None:
        self.session = session
        self.pool = SlotPool(session)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counter() if counts is None else counts
        """Counts of tokens, as in `Engine.stats`."""
        self.budget = PrefillBudget() if budget is None else budget

    def add(self, request: Request) -> None:
        """Put a request in the queue."""
        self.waiting.append(request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request now and free its slots."""
        request.end(reason)
        if request in self.waiting:
            self.waiting.remove(request)
        self._release_ended()

    def cache_usage(self) -> float:
        """Return the share of all slots' positions that running requests fill, from 0 to 1."""
        slot_ids = [slot_id for request in list(self.running) for slot_id in request.slot_ids]
        n_filled = sum(len(self.pool.cached_ids[slot_id]) for slot_id in slot_ids)
        return n_filled / (self.session.n_slots * self.session.capacity)

    def step(self) -> None:
        """Run one batch of tokens, and advance the requests that have everything they wait for."""
        batch = self._schedule()
        ready = self._run(batch)
        next_tokens = self._sample(ready)
        self._advance(ready, next_tokens)

    def _schedule(self) -> StepBatch:
        """End late requests, admit waiting ones, and return the tokens to run.

        Prompts that came together all run before the first of their texts goes on. Texts that are
        scored, which may be long, delay no sequence.
        """
        now = time.monotonic()
        for request in (*self.waiting, *self.running):
            if request.deadline < now:
                self.cancel(request, "timeout")
        if self.waiting:
            self._admit()
        decoding, prompts = list[Request](), list[Request]()
        for request in self.running:
            (decoding if request.is_decode else prompts).append(request)
        if prompts:
            newest = max((r.times.created for r in prompts if r.sequence), default=math.inf)
            if all(r.status is RequestStatus.READY and r.ready > newest for r in decoding):
                decoding = []
        batch = [(request, request.to_run) for request in decoding]
        n_left = self.budget.beside if decoding else self.budget.alone
        for request in prompts:
            if n_left:
                chunk = request.chunk(n_left)
                batch.append((request, chunk))
                n_left -= len(chunk[0].ids)
        return batch

    def _admit(self) -> None:
        """Give free slots to the requests that have waited longest.

        No request takes a slot that an earlier one waits for. If another request is running the
        prefix of one, that one waits, its slots stay free, and later requests may pass it.
        """
        n_free = len(self.pool.free)
        for request in list(self.waiting):
            n_free -= request.n_slots
            if n_free < 0:
                break
            if self._is_being_run(request.prompt):
                continue
            self.waiting.remove(request)
            try:
                slot_ids, n_shared = self.pool.take(request.n_slots, request.prompt, request.length)
            except NoRoomError as error:
                request.fail(error)
                continue
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["reused_tokens"] += n_shared
            self.running.append(request)
            request.begin(self.pool, slot_ids)
        self._release_ended()

    def _is_being_run(self, prompt: Sequence[int]) -> bool:
        """Whether a running request is running more of this prompt than any slot holds."""
        n_shared = 0
        for request in self.running:
            if request.status is RequestStatus.PREFILL:
                n_shared = max(n_shared, common_prefix(request.prompt, prompt[:-1]))
        n_held = self.pool.longest_prefix(prompt)[1]
        return n_shared >= MIN_SHARED and n_shared >= n_held + MIN_SHARED

    def _run(self, batch: StepBatch) -> list[Request]:
        """Run a batch; return the requests that have everything they wait for.

        An exception of the computation ends the requests that took part in it.
        """
        if not batch:
            return []
        began = time.perf_counter()
        chunks = [tokens for _, chunk in batch for tokens in chunk]
        try:
            logits = iter(self.pool.read(chunks))
        except Exception as error:
            for request, _ in batch:
                request.fail(error)
                for slot_id in request.slot_ids:
                    self.pool.truncate(slot_id, 0)
            return []
        lengths = [len(tokens.ids) for tokens in chunks]
        n_decode = lengths.count(1)
        self.budget.record(time.perf_counter() - began, sum(lengths) - n_decode, n_decode)
        ready = []
        for request, chunk in batch:
            if request.receive(chunk, list(islice(logits, len(chunk)))):
                ready.append(request)
        return ready

    def _sample(self, requests: list[Request]) -> dict[Request, NextToken | UserError]:
        """Return the next token of each sequence; those of all requests are sampled together."""
        inputs = dict[Request, SamplingInput]()
        for request in requests:
            if request.sequence is not None and request.to_run[0].sample:
                try:
                    inputs[request] = request.sequence.sampling_input(request.logits[0][-1])
                except BaseException as error:  # of a processor: this request's alone
                    request.fail(error)
        try:
            next_tokens = self.session.sample(list(inputs.values())) if inputs else []
        except Exception as error:
            for request in inputs:
                request.fail(error)
            return {}
        return dict(zip(inputs, next_tokens, strict=True))

    def _advance(
        self, requests: list[Request], next_tokens: dict[Request, NextToken | UserError]
    ) -> None:
        """Send each request its results, or its error, and free the slots of those that end."""
        for request in requests:
            next_token = next_tokens.get(request)
            if isinstance(next_token, UserError):
                request.fail(next_token)
            else:
                request.advance([RunResult(logits, next_token) for logits in request.logits])
        self._release_ended()

    def _release_ended(self) -> None:
        """Free the slots of requests that have ended."""
        for request in [r for r in self.running if r.status is RequestStatus.ENDED]:
            self.running.remove(request)
            self.pool.release(request.slot_ids)
            if request.sequence is not None:
                self.counts["generated_tokens"] += len(request.result.ids)
