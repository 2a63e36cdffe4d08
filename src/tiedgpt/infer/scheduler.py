"""Continuous batching: requests that come and go in the slots of a session.

In each step every running request reads what it wants (a chunk of its prompt, its newest token, a
draft), and those that have read it all choose their next tokens together. A request takes its slots
as soon as they are free, in the order of arrival; ids that a slot already holds are not read again.
The result of a request does not depend on the others. Nothing here knows threads: one owner calls.

Orca (Yu et al. 2022) is the paper on scheduling by steps, vLLM (Kwon et al. 2023) on prefix reuse.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from tiedgpt.errors import NoRoomError
from tiedgpt.infer.sampling import Choice
from tiedgpt.infer.sequence import FinishReason, SequenceState
from tiedgpt.infer.session import Session
from tiedgpt.infer.slots import Read, SlotPool, Slots, Steps, Wanted, common_prefix

PREFILL_TOKENS = 256
"""Prompt tokens that are read in a step while nobody waits for a next token.

A request can be cancelled between steps. Steps of 512 read 1.2 % faster, but take twice as long.
"""
LEAST_CHUNK, FIRST_CHUNK = 8, 32
"""Prompt tokens that are read in a step beside sequences that decode: at least, and at first."""
SLOWDOWN = 2.0
"""How much longer a step may take that also reads part of a prompt."""
MIN_SHARED = 32
"""A request waits for another to read a prefix that they share if it is longer by this."""


class Request:
    """Steps that a scheduler runs in `n_slots` slots, and how they ended.

    They fill at most `length` positions of each. `prompt` is what the first slot begins with and
    may share with others; `sequence` is what it writes.
    """

    def __init__(
        self,
        begin: Callable[[Slots], Steps[Any]],
        *,
        n_slots: int = 1,
        length: int = 0,
        prompt: Sequence[int] = (),
        sequence: SequenceState | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.n_slots, self.length, self.prompt = n_slots, length, prompt
        self.sequence, self.deadline = sequence, deadline
        self.has_ended = False
        self.result: Any = None
        self.error: Exception | None = None
        self.reads: list[Read] = []
        """What it wants to be read."""
        self.slots: list[int] = []
        self.created = time.monotonic()
        self.began = math.inf
        """When its prompt was read and its first token chosen; -inf once it goes on from there."""
        self._begin = begin
        self._steps: Steps[Any] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether it only wants newest tokens to be read."""
        return all(read.is_decode for read in self.reads)

    def begin(self, slots: Slots) -> list[Choice]:
        """Start in these slots; see `advance`."""
        self.slots = slots.numbers
        self._steps = self._begin(slots)
        return self.advance(None)

    def advance(self, answer: list[Any] | None) -> list[Choice]:
        """Go on to what is wanted next: `reads` are kept here, choices are returned.

        Whatever it raises is this request's error and nobody else's.
        """
        assert self._steps is not None
        try:
            wanted: Wanted = self._steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self.has_ended, self.result, self.reads = True, end.value, []
            return []
        except Exception as error:
            self.fail(error)
            return []
        except BaseException as error:  # such as SystemExit, which would end the thread for all
            self.fail(RuntimeError(f"a request raised {error!r}"))
            return []
        if isinstance(wanted[0], Choice):
            return wanted
        self.reads = wanted
        if self.began == math.inf and self.is_decode:
            self.began = time.monotonic()
        return []

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if not self.has_ended:
            self.error = error
            self.end("error")

    def end(self, reason: FinishReason) -> None:
        """End now, with the text so far as the result."""
        if self.has_ended:
            return
        self.has_ended, self.reads = True, []
        if self._steps is not None:
            self._steps.close()
        if self.sequence is not None:
            self.sequence.finish(reason)
            self.result = self.sequence.completion(self.error)


Part = tuple[Request, Read, int]
"""A request, what it wants to be read, and how many ids of that are read in this step."""


class Scheduler:
    """Runs requests in the slots of a session, whose owner it is."""

    def __init__(self, session: Session, counts: Counter[str] | None = None) -> None:
        self.session = session
        self.pool = SlotPool(session)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counter() if counts is None else counts
        """Tokens by what they were: see `Engine.stats`."""
        self._pace = _Pace()

    @property
    def busy(self) -> bool:
        """Whether any request is running or waits."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Let a request wait for its slots."""
        self.waiting.append(request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request now; its slots are free for the next."""
        request.end(reason)
        if request in self.waiting:
            self.waiting.remove(request)
        self._release_ended()

    def step(self) -> None:
        """Advance every running request.

        An exception of the computation ends the requests that took part in it.
        """
        now = time.monotonic()
        for request in [r for r in (*self.waiting, *self.running) if r.deadline < now]:
            self.cancel(request, "timeout")
        self._admit()
        if parts := self._within_budget():
            try:
                self._read(parts)
            except Exception as error:
                for request in {request: None for request, _, _ in parts}:
                    request.fail(error)
                    for slot in request.slots:
                        self.pool.truncate(slot, 0)
            self._advance()
        self._release_ended()

    def _admit(self) -> None:
        """Give free slots to the requests that have waited longest.

        No request takes a slot that one before it waits for. A request whose prefix another is
        reading waits for that, with its slots left free for it, and those behind it may pass.
        """
        free = len(self.pool.free)
        for request in list(self.waiting):
            free -= request.n_slots
            if free < 0:
                break
            if self._is_being_read(request.prompt):
                continue
            self.waiting.remove(request)
            try:
                slots, shared = self.pool.take(request.n_slots, request.prompt, request.length)
            except NoRoomError as error:
                request.fail(error)
                continue
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["reused_tokens"] += shared
            self.running.append(request)
            request.begin(slots)
        self._release_ended()

    def _is_being_read(self, prompt: Sequence[int]) -> bool:
        """Whether a running request is reading more of this prompt than any slot holds yet."""
        shared = 0
        for request in self.running:
            if request.prompt and not request.is_decode:
                shared = max(shared, common_prefix(request.prompt, prompt[:-1]))
        return shared >= MIN_SHARED and shared >= self.pool.longest_prefix(prompt)[1] + MIN_SHARED

    def _within_budget(self) -> list[Part]:
        """Return what is read in this step: newest tokens first, then parts of prompts.

        Prompts that came together are all read before the first of their texts goes on. Texts that
        are scored, which may be long, hold up nobody.
        """
        decoding, prompts = list[Part](), list[Part]()
        for request in self.running:
            for read in request.reads:
                if read.n_left:
                    (decoding if read.is_decode else prompts).append((request, read, read.n_left))
        newest = max((r.created for r, _, _ in prompts if r.sequence), default=math.inf)
        if prompts and newest < min((r.began for r, _, _ in decoding), default=math.inf):
            decoding = []
        room = self._pace.chunk if decoding else PREFILL_TOKENS
        for request, _, _ in decoding:
            request.began = -math.inf
        for request, read, n_left in prompts:
            if n := min(room, n_left):
                decoding.append((request, read, n))
                room -= n
        return decoding

    def _read(self, parts: list[Part]) -> None:
        """Read what is due of each in one call; learn what it costs."""
        began = time.perf_counter()
        slots = [read.number for _, read, _ in parts]
        ids = [read.ids[len(read.ids) - read.n_left :][:n] for _, read, n in parts]
        every = {read.number for _, read, _ in parts if read.every}
        answers = self.session.read(slots, ids, every=every)
        for (_, read, n), new, logits in zip(parts, ids, answers, strict=True):
            self.pool.held[read.number] += new
            read.add(n, logits)
        for request, read, _ in parts:
            if read.logits is not None and any(other.n_left for other in request.reads):
                read.logits = read.logits.copy()
        self._learn(parts, time.perf_counter() - began)

    def _learn(self, parts: list[Part], seconds: float) -> None:
        """Note what a step took."""
        n_decode = sum(read.is_decode for _, read, _ in parts)
        drafts = [read.drafted for _, read, _ in parts if read.drafted]
        if n_decode < len(parts):
            prompts = sum(n for _, read, n in parts if not read.is_decode)
            self._pace.note_mixed(seconds, prompts, n_decode)
        elif drafts:
            self.pool.price.note_drafted(seconds, sequences=n_decode, drafts=drafts)
        else:
            self.pool.price.note_plain(seconds, sequences=n_decode)
            self._pace.note_plain(seconds)

    def _advance(self) -> None:
        """Send logits to the requests that have read all, and tokens until all want to read."""
        answers: list[tuple[Request, list[Any]]] = [
            (request, [read.logits for read in request.reads])
            for request in self.running
            if request.reads and not any(read.n_left for read in request.reads)
        ]
        while answers:
            asked = [(r, wanted) for r, answer in answers if (wanted := r.advance(answer))]
            answers = []
            if asked:
                try:
                    chosen = iter(self.session.choose([c for _, wanted in asked for c in wanted]))
                except Exception as error:
                    for request, _ in asked:
                        request.fail(error)
                    break
                answers = [(r, [next(chosen) for _ in wanted]) for r, wanted in asked]

    def _release_ended(self) -> None:
        """Free the slots of requests that have ended."""
        for request in [request for request in self.running if request.has_ended]:
            self.running.remove(request)
            self.pool.release(request.slots)
            if request.sequence is not None:
                self.counts["generated_tokens"] += len(request.result.ids)
                self.counts["draft_tokens"] += request.sequence.n_drafted
                self.counts["accepted_tokens"] += request.sequence.n_accepted


class _Pace:
    """How many tokens of prompts may be read beside sequences that decode, by the clock."""

    def __init__(self) -> None:
        self.chunk = FIRST_CHUNK
        self._plain: float | None = None

    def note_plain(self, seconds: float) -> None:
        """A step that only decoded took this long."""
        before = seconds if self._plain is None else self._plain
        self._plain = before + 0.2 * (min(seconds, 2 * before) - before)

    def note_mixed(self, seconds: float, n_tokens: int, n_decode: int) -> None:
        """A step that also read `n_tokens` of prompts took this long."""
        if self._plain is None or not n_decode:
            return
        a_token = max(seconds - self._plain, 1e-9) / n_tokens
        fits = (SLOWDOWN - 1) * self._plain / a_token
        fits = min(fits, 2 * self.chunk)  # one quick step is no reason to read all
        self.chunk = max(LEAST_CHUNK, min(PREFILL_TOKENS, int(fits)))
