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
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiedgpt.infer.sampling import Choice
from tiedgpt.infer.sequence import FinishReason
from tiedgpt.infer.sequence import Sequence as Text
from tiedgpt.infer.session import Logits, Session
from tiedgpt.infer.slots import Read, SlotPool, Slots, SomeSlots, Steps, Wanted, common_prefix

PREFILL_TOKENS = 512
"""Prompt tokens that are read in a step while nobody waits for a next token."""
LEAST_CHUNK, FIRST_CHUNK = 8, 32
"""Prompt tokens that are read in a step beside sequences that decode: at least, and at first."""
SLOWDOWN = 2.0
"""How much longer a step may take that also reads part of a prompt."""
MIN_SHARED = 32
"""A request waits for another to read a prefix that they share if it is longer by this."""


@dataclass
class _Pending:
    """A read, and how far it has come."""

    request: Request
    read: Read
    n_done: int = 0
    parts: list[Logits] = field(default_factory=list)

    @property
    def n_left(self) -> int:
        return len(self.read.ids) - self.n_done

    @property
    def is_decode(self) -> bool:
        """Whether it is one newest token, with or without a draft."""
        return len(self.read.ids) - self.read.drafted == 1

    def part(self, n: int) -> Read:
        """Return the next n ids as a read of their own."""
        ids = self.read.ids[self.n_done : self.n_done + n]
        return Read(self.read.slot, ids, self.read.every, min(self.read.drafted, len(ids)))

    def add(self, n: int, logits: Logits) -> None:
        self.n_done += n
        if self.read.every or not self.n_left:
            self.parts.append(logits)

    def keep(self) -> None:
        """Copy the newest logits, which hold only until the next read."""
        self.parts[-1:] = [part.copy() for part in self.parts[-1:]]

    @property
    def logits(self) -> Logits:
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


class Request:
    """Steps that a scheduler runs in `n_slots` slots, and how they ended.

    `prompt` is what the first slot begins with and may share with others; `text` what it writes.
    """

    def __init__(
        self,
        begin: Callable[[Slots], Steps[Any]],
        *,
        n_slots: int = 1,
        prompt: Sequence[int] = (),
        text: Text | None = None,
        deadline: float | None = None,
    ) -> None:
        self.n_slots, self.prompt, self.text, self.deadline = n_slots, prompt, text, deadline
        self.has_ended = False
        self.result: Any = None
        self.error: Exception | None = None
        self.pending: list[_Pending] = []
        self.slots: list[int] = []
        self.created = time.monotonic()
        self.began = math.inf
        """When its prompt was read and its first token chosen; -inf once it goes on from there."""
        self._begin = begin
        self._steps: Steps[Any] | None = None

    def begin(self, slots: SomeSlots) -> list[Choice]:
        """Start in these slots; see `advance`."""
        self.slots = slots.numbers
        self._steps = self._begin(slots)
        return self.advance(None)

    def advance(self, answer: list[Any] | None) -> list[Choice]:
        """Go on to what is wanted next: reads become `pending`, choices are returned.

        Whatever it raises is this request's error and nobody else's.
        """
        assert self._steps is not None
        try:
            wanted: Wanted = self._steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self.has_ended, self.result, self.pending = True, end.value, []
            return []
        except Exception as error:
            self.fail(error)
            return []
        except BaseException as error:  # such as SystemExit, which would end the thread for all
            self.fail(RuntimeError(f"a request raised {error!r}"))
            return []
        if isinstance(wanted[0], Choice):
            return wanted
        self.pending = [_Pending(self, read) for read in wanted]
        if self.began == math.inf and all(pending.is_decode for pending in self.pending):
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
        self.has_ended, self.pending = True, []
        if self._steps is not None:
            self._steps.close()
        if self.text is not None:
            self.text.finish(reason)
            self.result = self.text.completion(self.error)


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
        for request in (*self.waiting, *self.running):
            if request.deadline is not None and now > request.deadline:
                self.cancel(request, "timeout")
        self._admit()
        if reads := self._within_budget():
            try:
                self._read(reads)
            except Exception as error:
                for request in {pending.request: None for pending, _ in reads}:
                    request.fail(error)
                    for slot in request.slots:
                        self.pool.truncate(slot, 0)
            self._advance()
        self._release_ended()

    def _admit(self) -> None:
        """Give free slots to the requests that have waited longest."""
        while self.waiting and self.waiting[0].n_slots <= len(self.pool.free):
            request = self.waiting[0]
            if self._is_being_read(request.prompt):
                return
            self.waiting.popleft()
            slots, shared = self.pool.take(request.n_slots, request.prompt)
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["reused_tokens"] += shared
            self.running.append(request)
            request.begin(slots)
        self._release_ended()

    def _is_being_read(self, prompt: Sequence[int]) -> bool:
        """Whether a running request is reading more of this prompt than any slot holds yet."""
        shared = 0
        for request in self.running:
            if request.prompt and not all(pending.is_decode for pending in request.pending):
                shared = max(shared, common_prefix(request.prompt, prompt[:-1]))
        return shared >= MIN_SHARED and shared >= self.pool.longest_prefix(prompt)[1] + MIN_SHARED

    def _within_budget(self) -> list[tuple[_Pending, Read]]:
        """Return what is read in this step: newest tokens first, then parts of prompts.

        Prompts that came together are all read before the first of their texts goes on. Texts that
        are scored, which may be long, hold up nobody.
        """
        pending = [p for request in self.running for p in request.pending if p.n_left]
        decoding = [p for p in pending if p.is_decode]
        prompts = [p for p in pending if not p.is_decode]
        newest = max((p.request.created for p in prompts if p.request.text), default=math.inf)
        if newest < min((p.request.began for p in decoding), default=math.inf):
            decoding = []
        room = self._pace.chunk if decoding else PREFILL_TOKENS
        reads = [(p, p.read) for p in decoding]
        for p in decoding:
            p.request.began = -math.inf
        for prompt in prompts:
            if n := min(room, prompt.n_left):
                reads.append((prompt, prompt.part(n)))
                room -= n
        return reads

    def _read(self, reads: list[tuple[_Pending, Read]]) -> None:
        """Read, in one call, or in two if only some want all logits; learn what it costs."""
        began = time.perf_counter()
        few = 2 if any(read.every for _, read in reads) else 0  # a call costs more than few logits
        groups: tuple[list[tuple[_Pending, Read]], ...] = ([], [])
        for pending, read in reads:
            groups[read.every or len(read.ids) <= few].append((pending, read))
        for every, group in zip((False, True), groups, strict=True):
            if not group:
                continue
            slots, ids = [read.slot for _, read in group], [read.ids for _, read in group]
            answers = self.session.read(slots, ids, every=every)
            if not every and groups[True]:
                answers = [logits.copy() for logits in answers]
            for (pending, read), logits in zip(group, answers, strict=True):
                self.pool.held[read.slot] += read.ids
                pending.add(len(read.ids), logits if read.every else logits[-1:])
        for pending, _ in reads:
            if any(other.n_left for other in pending.request.pending):
                pending.keep()
        self._learn(reads, time.perf_counter() - began)

    def _learn(self, reads: list[tuple[_Pending, Read]], seconds: float) -> None:
        """Note what a step took."""
        n_decode = sum(pending.is_decode for pending, _ in reads)
        drafts = [read.drafted for _, read in reads if read.drafted]
        if n_decode < len(reads):
            prompts = sum(len(read.ids) for pending, read in reads if not pending.is_decode)
            self._pace.note_mixed(seconds, prompts, n_decode)
        elif drafts:
            self.pool.price.note_drafted(seconds, sequences=n_decode, drafts=drafts)
        else:
            self.pool.price.note_plain(seconds, sequences=n_decode)
            self._pace.note_plain(seconds)

    def _advance(self) -> None:
        """Send logits to the requests that have read all, and tokens until all want to read."""
        ready = [r for r in self.running if r.pending and not any(p.n_left for p in r.pending)]
        answers: dict[Request, list[Any]] = {r: [p.logits for p in r.pending] for r in ready}
        while answers:
            choices = {r: wanted for r, answer in answers.items() if (wanted := r.advance(answer))}
            answers = {}
            if choices:
                every = [choice for wanted in choices.values() for choice in wanted]
                try:
                    chosen = iter(self.session.choose(every))
                except Exception as error:
                    for request in choices:
                        request.fail(error)
                    break
                answers = {r: [next(chosen) for _ in wanted] for r, wanted in choices.items()}

    def _release_ended(self) -> None:
        """Free the slots of requests that have ended."""
        for request in [request for request in self.running if request.has_ended]:
            self.running.remove(request)
            self.pool.release(request.slots)
            if request.text is not None:
                self.counts["generated_tokens"] += len(request.result.ids)
                self.counts["draft_tokens"] += request.text.n_drafted
                self.counts["accepted_tokens"] += request.text.n_accepted


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
