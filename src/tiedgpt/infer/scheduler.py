"""Sequences that come and go while others run: continuous batching in a session's slots.

Each step every running sequence reads what it has not yet read (its prompt, its newest token, a
draft) and chooses its next token. A new one takes a slot as soon as one is free, at any step. What
a sequence gives does not depend on its neighbours. Nothing here knows threads: one owner calls.

Orca (Yu et al. 2022) is the paper on scheduling by steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.infer.continuation import Continuation
from tiedgpt.infer.filters import Array
from tiedgpt.infer.joint import Joint, Lane, Read, Steps, run
from tiedgpt.infer.request import Request, require_positive
from tiedgpt.infer.session import Session
from tiedgpt.text import Tokenizer

SCORED_AT_A_TIME = 128
"""Tokens of a prompt that are read at once where each is scored: (n, V) scores are held."""


@dataclass(frozen=True)
class _Reading:
    """What a sequence reads in a step."""

    sequence: Continuation
    read: Read
    draft: list[int]
    """The last of the ids, where they are a guess."""
    scored_from: int | None
    """The first id's place in the prompt, where the prompt's tokens are scored."""
    complete: bool
    """Whether nothing is left to read, so that a token can be chosen."""


Advanced = list[tuple[Continuation, str]]
"""Sequences that have advanced, and their new text."""


class Sequences:
    """Sequences in the slots of a lane, whose owner it is; a `Scheduler` has a session's.

    `prefill_chunk`: tokens of a prompt that are read in a step at the most, so that a long one does
    not hold up the others; None reads it at once.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        tokenizer: Tokenizer | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None:
            require_positive("prefill_chunk", prefill_chunk)
        self.lane = lane
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Continuation] = deque()
        self.running: list[Continuation] = []

    @property
    def busy(self) -> bool:
        """Whether any sequence is running or waits."""
        return bool(self.running or self.waiting)

    def add(self, prompt: list[int], request: Request, *, copies: int = 0) -> Continuation:
        """Let a prompt's ids be continued; return the handle, which `step` advances.

        Raises `UserError` for a request that the model cannot meet; nothing is computed yet.
        """
        capacity, v = self.lane.capacity, self.lane.config.vocab_size
        if not prompt or not 0 <= min(prompt) <= max(prompt) < v:
            raise UserError(f"a prompt is at least one id of a vocabulary of {v} tokens")
        if len(prompt) > capacity:
            if request.context_end == "stop":
                raise UserError(
                    f"the prompt has {len(prompt)} tokens and the model's context {capacity}: "
                    "shorten it, or let the context slide (--context-end slide, or "
                    "context_end='slide')"
                )
            if request.wants_prompt_scores:
                raise UserError(
                    f"prompt_logprobs of {len(prompt)} tokens in a context of {capacity}: the "
                    "first would not be read; Engine.score reads longer texts"
                )
        sequence = Continuation(
            prompt, request, config=self.lane.config, tokenizer=self.tokenizer, copies=copies
        )
        self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Continuation) -> None:
        """End a sequence now; its slot is free for the next."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.finish_reason is None:
            sequence.finish("cancelled")
        self._release(sequence)

    def steps(self) -> Steps[Advanced]:
        """Advance every running sequence by a token; return each that has, with its new text.

        One whose `finish_reason` is set has ended. Where the scores of one cannot be used, it ends
        with its `error` set, and the others go on. A sequence whose prompt is not read to its end
        is not among them; one whose draft came true advances by more.
        """
        self._admit()
        if not self.running:
            return []
        readings = [self._reading(sequence) for sequence in self.running]
        scores = yield from self.lane.read([reading.read for reading in readings])
        advanced = []
        for reading, its in zip(readings, scores, strict=True):
            sequence = reading.sequence
            if reading.scored_from is not None:
                sequence.note_prompt(reading.scored_from, its)
            if reading.complete:
                rows = its[-1 - len(reading.draft) :]
                advanced.append((sequence, self._take(reading, rows)))
        return advanced

    def _admit(self) -> None:
        """Give the slots that are free to those that have waited longest."""
        taken = {sequence.slot for sequence in self.running} if self.waiting else set()
        for slot in range(self.lane.slots):
            if not self.waiting:
                return
            if slot not in taken:
                sequence = self.waiting.popleft()
                sequence.slot = slot
                self.lane.cut(slot, 0)
                self.running.append(sequence)

    def _reading(self, sequence: Continuation) -> _Reading:
        """Decide what a sequence reads next.

        Positions are learned, so a window that slides is read anew.
        """
        assert sequence.slot is not None
        capacity, request = self.lane.capacity, sequence.request
        if len(sequence.ids) - sequence.start > capacity:
            sequence.start = len(sequence.ids) - max(1, capacity // 2)
            self.lane.cut(sequence.slot, 0)
        at = sequence.start + self.lane.lengths[sequence.slot]
        pending = sequence.ids[at:]
        is_scored = request.wants_prompt_scores and not sequence.start and at < sequence.n_prompt
        chunk = self.prefill_chunk or capacity
        chunk = min(chunk, SCORED_AT_A_TIME) if is_scored else chunk
        draft: list[int] = []
        if sequence.drafter is not None and len(pending) == 1:
            room = min(capacity - (at - sequence.start) - 1, sequence.n_left - 1)
            draft = sequence.drafter.draft(sequence.ids, price=self.lane.price.of, room=room)
        read = Read(
            sequence.slot,
            [*pending[:chunk], *draft],
            every=bool(draft) or is_scored,
            drafted=len(draft),
        )
        return _Reading(
            sequence, read, draft, at if is_scored else None, complete=len(pending) <= chunk
        )

    def _take(self, reading: _Reading, rows: Array) -> str:
        """Choose by each row (V,) in turn while the draft comes true; return the new text."""
        sequence, pieces = reading.sequence, []
        try:
            for row, drafted in zip(rows, [*reading.draft, None], strict=True):
                pieces.append(sequence.take(row))
                if sequence.finish_reason is not None:
                    break
                full = len(sequence.ids) - sequence.start > self.lane.capacity
                if full and sequence.request.context_end == "stop":
                    pieces.append(sequence.finish("context"))
                if sequence.ids[-1] != drafted:
                    break
        except TiedGPTError as error:
            sequence.error = error
            pieces.append(sequence.finish("error"))
        if sequence.finish_reason is not None:
            self._release(sequence)
        elif reading.draft:
            self.lane.cut(reading.read.slot, len(sequence.ids) - 1 - sequence.start)
        return "".join(pieces)

    def _release(self, sequence: Continuation) -> None:
        sequence.slot = None
        if sequence in self.running:
            self.running.remove(sequence)


class Scheduler(Sequences):
    """Runs sequences in the slots of a session, whose owner it is; `prefill_chunk` as above."""

    def __init__(
        self,
        session: Session,
        *,
        tokenizer: Tokenizer | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self._joint = Joint(session)
        lane = self._joint.lane(0, session.slots, session.capacity)
        super().__init__(lane, tokenizer=tokenizer, prefill_chunk=prefill_chunk)

    def step(self) -> Advanced:
        """Advance every running sequence by a token; see `Sequences.steps`."""
        return run(self._joint, self.steps())
