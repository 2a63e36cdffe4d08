"""Contrastive search: of the likeliest tokens, the one least like what came before.

Su et al. 2022, "A Contrastive Framework for Neural Text Generation" (arXiv 2202.06417):

    x_t = argmax over v in the k likeliest of (1 - alpha) P(v | x_<t) - alpha max_j s(h_v, h_x_j)

with s the cosine and h the model's last hidden states (after the final layer norm): h_v is what the
model makes of v in that place. There is no chance in it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from tiedgpt.infer import filters
from tiedgpt.infer.continuation import Completion, Continuation
from tiedgpt.infer.filters import Array
from tiedgpt.infer.joint import Lane, Read, Steps
from tiedgpt.infer.sampling import require_choice
from tiedgpt.infer.session import Scores

CHUNK = 64
"""Positions of the prompt read at a time: of each the V logits come back, too."""


def contrastive_search(
    lane: Lane, begun: Continuation, *, penalty_alpha: float
) -> Steps[Completion]:
    """Continue what is begun until it ends or the lane is full: every token is read.

    A slot of the lane is for a candidate. `penalty_alpha` from 0 (greedy) to 1.
    """
    states, logits = yield from _read_prompt(lane, begun.ids)
    for slot in range(1, lane.slots):
        lane.copy(0, slot)
    # Each slot holds one candidate. All but the winner's drop theirs, and read the winner's token
    # together with their next candidate: nothing is copied.
    unread: list[list[int]] = [[] for _ in range(lane.slots)]
    for _ in range(lane.capacity - begun.n_prompt):
        adjusted = begun.adjusted(logits)
        require_choice(adjusted)
        likeliest = filters.likeliest(adjusted, lane.slots)
        log_p = np.array([value for _, value in likeliest if value > -np.inf])
        candidates = [token for token, _ in likeliest][: len(log_p)]
        scores = yield from lane.read(
            [Read(n, [*unread[n], token], states=True) for n, token in enumerate(candidates)]
        )
        h = _directions(np.concatenate([_states(score) for score in scores]))
        likeness = (h @ states.T).max(axis=1)
        value = (1 - penalty_alpha) * np.exp(log_p) - penalty_alpha * likeness
        winner = int(value.argmax())
        token = candidates[winner]
        if piece := begun.note(token, logits):
            yield piece
        if begun.finish_reason is not None:
            return begun.completion()
        states = np.concatenate([states, h[winner : winner + 1]])
        logits = scores[winner].logits[-1]
        for slot in range(lane.slots):
            if slot >= len(candidates):  # it read nothing
                unread[slot].append(token)
            elif slot == winner:
                unread[slot] = []
            else:
                lane.cut(slot, lane.lengths[slot] - 1)
                unread[slot] = [token]
    if piece := begun.finish("context"):
        yield piece
    return begun.completion()


def _read_prompt(
    lane: Lane, prompt: Sequence[int]
) -> Generator[list[Read], list[Scores], tuple[Array, Array]]:
    """Read into slot 0; return the states' directions (T, D) and the last logits (V,)."""
    parts = []
    for start in range(0, len(prompt), CHUNK):
        ids = prompt[start : start + CHUNK]
        (scores,) = yield from lane.read([Read(0, ids, every=True, states=True)])
        parts.append(_directions(_states(scores)))
    return np.concatenate(parts), scores.logits[-1]


def _states(scores: Scores) -> Array:
    assert scores.states is not None, "they were asked for"
    return scores.states


def _directions(states: Array) -> Array:
    """Scale each state (n, D) to length 1: products are then cosines."""
    unit: Array = states / np.linalg.norm(states, axis=1, keepdims=True)
    return unit
