"""Beam search: keep the `num_beams` best prefixes, and return the likeliest continuation.

The rules are those of transformers, so that the same settings give the same ids. The score of a
continuation is sum log P / length ** length_penalty (Wu et al. 2016, arXiv 1609.08144, section 7,
without its constants). With E tokens that end a text, each step considers the
(1 + E) `num_beams` best candidates, so that `num_beams` prefixes are left even if others end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tiedgpt.infer import filters
from tiedgpt.infer.sampling import NextToken, no_token_error
from tiedgpt.infer.sequence import Completion, SequenceState
from tiedgpt.infer.slots import Decoding, SlotPool, TokensToRun


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt that beam search found."""

    ids: list[int]
    """The new tokens, with the end-of-text token if it ended by itself."""
    logprobs: list[float]
    """The model's own log P of each new token."""
    score: float
    """sum log P / length ** length_penalty, after penalties; higher is better."""


@dataclass(frozen=True)
class _Beam:
    """A prefix that is not complete; its slot holds all but its last token."""

    ids: list[int]
    logprobs: list[float]
    total: float
    slot_id: int


def search(
    pool: SlotPool, slot_ids: Sequence[int], sequence: SequenceState
) -> Decoding[Completion]:
    """Return the completion with the highest score that beam search finds."""
    hypotheses = yield from beam_search(pool, slot_ids, sequence)
    for token, logprob in zip(hypotheses[0].ids, hypotheses[0].logprobs, strict=True):
        sequence.append(NextToken(token, logprob))
    sequence.finish("context")
    return sequence.completion()


def beam_search(
    pool: SlotPool, slot_ids: Sequence[int], sequence: SequenceState
) -> Decoding[list[Hypothesis]]:
    """Find at most `num_beams` continuations of a sequence's prompt, the best first.

    `length_penalty`: above 0 favours longer continuations, below 0 shorter ones. `early_stopping`:
    True stops when there are `num_beams` continuations; False when the best prefix, scored at its
    present length, is not better than the worst of them; "never" scores it at the length that is
    best for it. `slot_ids` has a slot for each beam.
    """
    session, config, prompt = pool.session, sequence.config, sequence.ids
    num_beams, length_penalty = config.num_beams, config.length_penalty
    n_candidates = max(2, 1 + len(sequence.ends)) * num_beams
    max_new_tokens = min(session.capacity - len(prompt) + 1, config.max_new_tokens)
    results = yield [TokensToRun(slot_ids[0], prompt[session.lengths[slot_ids[0]] :])]
    beams = [_Beam([], [], 0.0, slot_ids[0])]
    complete: list[Hypothesis] = []
    for length in range(1, max_new_tokens + 1):
        rows = [result.logits[-1] for result in results]
        log_p = [row[: sequence.n_tokens] - np.float32(filters.log_normalizer(row)) for row in rows]
        totals = np.stack(
            [
                beam.total + sequence.adjust([*prompt, *beam.ids], row).astype(np.float64)
                for beam, row in zip(beams, log_p, strict=True)
            ]
        )
        if (error := no_token_error(float(totals.max()))) is not None:
            raise error
        growing: list[_Beam] = []
        for rank, flat in enumerate(filters.highest(totals.ravel(), n_candidates)):
            row, token = divmod(int(flat), totals.shape[1])
            beam, total = beams[row], float(totals[row, token])
            if total == -np.inf:  # ruled out
                break
            ids = [*beam.ids, token]
            logprobs = [*beam.logprobs, float(log_p[row][token])]
            if token in sequence.ends or length == max_new_tokens:
                if rank < num_beams:
                    complete.append(Hypothesis(ids, logprobs, total / length**length_penalty))
            elif len(growing) < num_beams:
                growing.append(_Beam(ids, logprobs, total, beam.slot_id))
        complete = sorted(complete, key=lambda hypothesis: -hypothesis.score)[:num_beams]
        if not growing:
            break
        if len(complete) == num_beams:
            longest = config.early_stopping == "never" and length_penalty > 0
            hopeful_length = max_new_tokens if longest else length
            best_hope = growing[0].total / hopeful_length**length_penalty
            if config.early_stopping is True or best_hope <= complete[-1].score:
                break
        beams = _assign_slots(pool, slot_ids, growing)
        results = yield [TokensToRun(beam.slot_id, beam.ids[-1:]) for beam in beams]
    return complete


def _assign_slots(pool: SlotPool, slot_ids: Sequence[int], beams: list[_Beam]) -> list[_Beam]:
    """Give each beam a slot: the first child keeps its parent's, others get a copy of it."""
    parents = {beam.slot_id for beam in beams}
    free = [slot_id for slot_id in slot_ids if slot_id not in parents]
    children = []
    for beam in beams:
        slot_id = beam.slot_id
        if slot_id in parents:
            parents.remove(slot_id)
        else:
            slot_id = free.pop()
            pool.copy(beam.slot_id, slot_id)
        children.append(replace(beam, slot_id=slot_id))
    return children
