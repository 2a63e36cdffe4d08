"""Beam search: the likeliest continuations that keeping the `num_beams` best prefixes finds.

The rules are those of transformers, so that the same settings give the same ids: a continuation is
scored sum log P / length ** length_penalty (Wu et al. 2016, arXiv 1609.08144, section 7, without
its constants); at each step the 2 `num_beams` best candidates are looked at, so that `num_beams` of
them go on even where as many ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiedgpt.infer import filters
from tiedgpt.infer.detokenizer import Detokenizer
from tiedgpt.infer.filters import Array
from tiedgpt.infer.options import EarlyStopping
from tiedgpt.infer.sampling import no_choice
from tiedgpt.infer.sequence import Completion, FinishReason, SequenceState
from tiedgpt.infer.slots import Read, SlotPool, Steps
from tiedgpt.text import Tokenizer

Adjust = Callable[[Sequence[int], Array], Array]
"""(ids of prompt and text, scores (V,) of the next) -> the scores to choose by."""


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt that beam search found."""

    ids: list[int]
    """The new tokens, with the end-of-text token if it ended by itself."""
    logprobs: list[float]
    """log P of each new token under the model itself."""
    score: float
    """sum log P (adjusted) / length ** length_penalty; higher is better."""


@dataclass(frozen=True)
class _Beam:
    """A prefix that is still growing; all but its last token are in its slot."""

    ids: list[int]
    logprobs: list[float]
    total: float
    slot_id: int


def search(
    pool: SlotPool,
    slot_ids: Sequence[int],
    sequence: SequenceState,
    tokenizer: Tokenizer | None,
) -> Steps[Completion]:
    """Return the best text that beam search finds."""
    config, prompt = sequence.config, sequence.ids
    max_new_tokens = min(pool.session.capacity - len(prompt) + 1, config.max_new_tokens)
    hypotheses = yield from beam_search(
        pool, slot_ids, prompt, num_beams=config.num_beams, max_new_tokens=max_new_tokens,
        length_penalty=config.length_penalty, early_stopping=config.early_stopping,
        adjust=sequence.adjusted, n_tokens=sequence.n_tokens, ends=sequence.ends,
    )  # fmt: skip
    best = hypotheses[0]
    has_ended = best.ids[-1] in sequence.ends
    detokenizer = Detokenizer(tokenizer, prompt[-1])
    for token in best.ids[: len(best.ids) - has_ended]:
        detokenizer.push(token)
    detokenizer.finish()
    cut: FinishReason = "length" if max_new_tokens == config.max_new_tokens else "context"
    return Completion(best.ids, detokenizer.text, "stop" if has_ended else cut, best.logprobs)


def beam_search(
    pool: SlotPool,
    slot_ids: Sequence[int],
    prompt: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    adjust: Adjust = lambda ids, scores: scores,
    n_tokens: int | None = None,
    ends: Collection[int | None] = (),
) -> Steps[list[Hypothesis]]:
    """Find at most `num_beams` continuations of the prompt's ids, the best first.

    `length_penalty`: above 0 longer continuations gain, below 0 shorter ones. `early_stopping`:
    True ends as soon as there are `num_beams` continuations; False also when the best prefix,
    scored at its present length, is no better than the worst of them; "never" assumes the length
    that suits it best. `adjust` is given log P of the next token. `n_tokens`: ids from there on
    stand for no token and are not considered. `ends` end a continuation, as the config's end does.

    There is a slot for each beam; prompt and new tokens, less one, fit each.
    """
    session = pool.session
    ends = {session.config.eos_token_id, *ends}
    reads = [Read(slot_ids[0], prompt[session.lengths[slot_ids[0]] :])]
    yield reads
    rows = [read.next_logits for read in reads]
    beams = [_Beam([], [], 0.0, slot_ids[0])]
    found: list[Hypothesis] = []
    for length in range(1, max_new_tokens + 1):
        log_p = [row[:n_tokens] - np.float32(filters.log_normalizer(row)) for row in rows]
        totals = np.stack(
            [
                beam.total + adjust([*prompt, *beam.ids], row).astype(np.float64)
                for beam, row in zip(beams, log_p, strict=True)
            ]
        )
        if (error := no_choice(float(totals.max()))) is not None:
            raise error
        growing: list[_Beam] = []
        for rank, flat in enumerate(_highest(totals.ravel(), 2 * num_beams)):
            row, token = divmod(int(flat), totals.shape[1])
            beam, total = beams[row], float(totals[row, token])
            if total == -np.inf:  # ruled out
                break
            ids = [*beam.ids, token]
            logprobs = [*beam.logprobs, float(log_p[row][token])]
            if token in ends or length == max_new_tokens:
                if rank < num_beams:
                    found.append(Hypothesis(ids, logprobs, total / length**length_penalty))
            elif len(growing) < num_beams:
                growing.append(_Beam(ids, logprobs, total, beam.slot_id))
        found = sorted(found, key=lambda hypothesis: -hypothesis.score)[:num_beams]
        if not growing:
            break
        if len(found) == num_beams:
            longest = early_stopping == "never" and length_penalty > 0
            hopeful_length = max_new_tokens if longest else length
            best_hope = growing[0].total / hopeful_length**length_penalty
            if early_stopping is True or best_hope <= found[-1].score:
                break
        beams = _own_slots(pool, slot_ids, growing)
        reads = [Read(beam.slot_id, beam.ids[-1:]) for beam in beams]
        yield reads
        rows = [read.next_logits for read in reads]
    return found


def _own_slots(pool: SlotPool, slot_ids: Sequence[int], beams: list[_Beam]) -> list[_Beam]:
    """Give each beam a slot: the first child keeps its parent's, the others get copies of it."""
    kept = {beam.slot_id for beam in beams}
    free = [slot_id for slot_id in slot_ids if slot_id not in kept]
    own = []
    for beam in beams:
        slot_id = beam.slot_id
        if slot_id in kept:
            kept.remove(slot_id)
        else:
            slot_id = free.pop()
            pool.copy(beam.slot_id, slot_id)
        own.append(replace(beam, slot_id=slot_id))
    return own


def _highest(values: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Return the places of the k highest values (N,), the highest first."""
    k = min(k, len(values))
    places = np.argpartition(-values, k - 1)[:k]
    return places[np.argsort(-values[places], kind="stable")]
