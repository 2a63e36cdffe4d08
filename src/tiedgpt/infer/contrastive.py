"""Contrastive search: of the likeliest tokens, the one least like what came before.

Su et al. 2022, "A Contrastive Framework for Neural Text Generation" (arXiv 2202.06417):

    x_t = argmax over v in the k likeliest of (1 - alpha) P(v | x_<t) - alpha max_j s(h_v, h_x_j)

with s the cosine and h the model's last hidden states (after the final layer norm): h_v is what the
model makes of v in that place. There is no chance in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tiedgpt.infer import filters
from tiedgpt.infer.beam import Adjust, unchanged
from tiedgpt.infer.filters import Array
from tiedgpt.infer.session import Runner, Session

CHUNK = 64
"""Positions of the prompt read at a time: of each the V logits come back, too."""


def contrastive_search(
    runner: Runner,
    prompt: Sequence[int],
    *,
    top_k: int,
    penalty_alpha: float,
    max_new_tokens: int,
    adjust: Adjust = unchanged,
    n_tokens: int | None = None,
) -> Iterator[tuple[int, Array]]:
    """Yield (token, logits (V,) from which it was chosen), the end-of-text token the last.

    `penalty_alpha` from 0 (greedy) to 1; `adjust` is given the logits; `n_tokens`: ids from there
    on stand for no token. The caller sees to it that prompt and new tokens fit the runner's
    context: all of them are read.
    """
    ids = list(prompt)
    session = runner.session(slots=top_k, capacity=len(prompt) + max_new_tokens)
    states, logits = _read_prompt(session, prompt)
    for slot in range(1, top_k):
        session.copy(0, slot)
    # Each slot holds one candidate. All but the winner's drop theirs, and read the winner's token
    # together with their next candidate: nothing is copied.
    unread: list[list[int]] = [[] for _ in range(top_k)]
    for _ in range(max_new_tokens):
        likeliest = filters.likeliest(adjust(ids, logits[:n_tokens]), top_k)
        log_p = np.array([value for _, value in likeliest if value > -np.inf])
        candidates = [token for token, _ in likeliest][: len(log_p)]
        slots = list(range(len(candidates)))
        scores = session.read(
            slots, [[*unread[slot], candidates[slot]] for slot in slots], states=True
        )
        h = _directions(np.concatenate([_states(score.states)[-1:] for score in scores]))
        likeness = (h @ states.T).max(axis=1)
        value = (1 - penalty_alpha) * np.exp(log_p) - penalty_alpha * likeness
        winner = int(value.argmax())
        token = candidates[winner]
        yield token, logits
        if token == runner.config.eos_token_id:
            return
        ids.append(token)
        states = np.concatenate([states, h[winner : winner + 1]])
        logits = scores[winner].logits[-1]
        for slot in range(top_k):
            if slot >= len(candidates):  # it read nothing
                unread[slot].append(token)
            elif slot == winner:
                unread[slot] = []
            else:
                session.cut(slot, session.lengths[slot] - 1)
                unread[slot] = [token]


def _read_prompt(session: Session, prompt: Sequence[int]) -> tuple[Array, Array]:
    """Read into slot 0; return the states' directions (T, D) and the last logits (V,)."""
    parts = []
    for start in range(0, len(prompt), CHUNK):
        (scores,) = session.read([0], [prompt[start : start + CHUNK]], every=True, states=True)
        parts.append(_directions(_states(scores.states)))
    return np.concatenate(parts), scores.logits[-1]


def _states(states: Array | None) -> Array:
    assert states is not None, "they were asked for"
    return states


def _directions(states: Array) -> Array:
    """Scale each state (n, D) to length 1: products are then cosines."""
    unit: Array = states / np.linalg.norm(states, axis=1, keepdims=True)
    return unit
