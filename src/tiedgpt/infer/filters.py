"""Penalties and filters of the next token's logits (V,) in plain numpy.

Each computes the same as transformers under the same name; presence and frequency penalties are
those of OpenAI's API. Filters return the ids that may be drawn. None sorts the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ids = NDArray[np.intp]
FIRST_LOOK = 512
"""How many candidates are sorted at first; if they do not suffice, eight times as many."""
ROUNDING = 1e-12
"""Share of a sum of float64 probabilities that its rounding may take: a sum so near reaches p."""
BLOCK = 256
"""Tokens whose probabilities are summed together when one is drawn."""


def penalize_repetition(scores: Array, seen: Sequence[int], penalty: float) -> None:
    """Divide positive logits of the tokens seen by `penalty`, multiply negative ones (in place).

    Keskar et al. 2019, "CTRL", section 4.1, extended to negative logits.
    """
    ids = np.unique(np.asarray(seen, dtype=np.intp))
    ids = ids[ids < len(scores)]
    old = scores[ids]
    scores[ids] = np.where(old > 0, old / penalty, old * penalty)


def penalize_counts(
    scores: Array, generated: Sequence[int], presence: float, frequency: float
) -> None:
    """Subtract `presence`, and `frequency` for each time, from generated tokens (in place)."""
    ids, counts = np.unique(np.asarray(generated, dtype=np.intp), return_counts=True)
    scores[ids] -= (presence + frequency * counts).astype(np.float32)


def add_bias(scores: Array, bias: Mapping[int, float]) -> None:
    """Add a bias to the logits of single tokens (in place)."""
    for token, value in bias.items():
        if token < len(scores):
            scores[token] += value


def softmax(scores: Array) -> Array:
    """Return probabilities; that of -inf is 0. At least one score must be finite."""
    p = _unnormalized(scores)
    p /= p.sum(dtype=np.float64).astype(np.float32)
    return p


def _unnormalized(scores: Array) -> Array:
    """Return the exponentials of scores, scaled so that the highest is 1."""
    p: Array = scores - scores.max()
    return np.exp(p, out=p)


def top_n_sigma(scores: Array, n: float) -> Ids:
    """Return the ids whose scores are at most n standard deviations below the highest.

    Scores of -inf are not counted. Tang et al. 2024, "Top-nσ: Not All Logits Are You Need".
    """
    deviation = scores[scores > -np.inf].std(dtype=np.float64)
    return np.flatnonzero(scores >= np.float32(scores.max() - n * deviation))


def top_k(scores: Array, k: int) -> Ids | None:
    """Return the ids of the k highest scores, and of ties with the last of them; None for all."""
    if k >= len(scores):
        return None
    return np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[-k])


def top_p(scores: Array, mass: float) -> Ids:
    """Return the fewest ids, the likeliest first, that together reach this probability.

    Of equal scores, lower ids come first. Sums are in float64. Holtzman et al. 2020, "The Curious
    Case of Neural Text Degeneration".
    """
    p = np.exp(scores.astype(np.float64) - scores.max())
    return _until_mass(-scores, p, mass * p.sum() * (1 - ROUNDING))


def min_p(scores: Array, share: float) -> Ids:
    """Return the ids that have at least this share of the likeliest one's probability.

    Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    p = softmax(scores)
    return np.flatnonzero(p >= np.float32(share) * p.max())


def _until_mass(rank: Array, p: NDArray[np.float64], mass: float) -> Ids:
    """Return the ids lowest in `rank` up to the one with which the sum of `p` reaches `mass`."""
    n = FIRST_LOOK
    while True:
        if n < len(rank):
            near = np.flatnonzero(rank <= np.partition(rank, n)[n])
        else:
            near = np.arange(len(rank))
        near = near[np.argsort(rank[near], kind="stable")]
        reached = np.cumsum(p[near])
        last = int(np.searchsorted(reached, mass))
        if last < len(near) or len(near) == len(rank):
            ids = near[: last + 1]
            return np.sort(ids[p[ids] > 0])
        n *= 8


def log_normalizer(logits: Array) -> float:
    """Return log sum exp(logits), which turns a logit into log P."""
    return float(logits.max()) + math.log(_unnormalized(logits).sum(dtype=np.float64))


def highest(values: NDArray[Any], k: int) -> Ids:
    """Return the indices of the k highest values (N,), the highest first."""
    k = min(k, len(values))
    indices = np.argpartition(values, len(values) - k)[len(values) - k :]
    return indices[np.argsort(-values[indices], kind="stable")]


def likeliest(logits: Array, k: int, n_tokens: int) -> list[tuple[int, float]]:
    """Return the k likeliest of the first `n_tokens` ids as (id, logprob), the likeliest first."""
    total = log_normalizer(logits)
    return [(int(i), float(logits[i]) - total) for i in highest(logits[:n_tokens], k)]


def draw(scores: Array, uniform: float) -> int:
    """Return the index at which the cumulative probability passes `uniform`, from [0, 1).

    The sum is searched by blocks, then within one: a running sum over V takes ten times as long.
    """
    p = _unnormalized(scores)
    starts = np.arange(0, len(p), BLOCK)
    block, rest = _passing(np.add.reduceat(p, starts, dtype=np.float64), uniform)
    start = int(starts[block])
    within, _ = _passing(p[start : start + BLOCK].astype(np.float64), rest)
    return start + within


def _passing(weights: NDArray[np.float64], share: float) -> tuple[int, float]:
    """Return where the running sum passes this share of the whole, and how far into that weight."""
    reached = np.cumsum(weights)
    sought = share * reached[-1]
    at = int(np.searchsorted(reached, sought, side="right"))
    if at == len(reached):  # rounding: the last weight that is not 0
        at = int(np.searchsorted(reached, reached[-1]))
    return at, float((sought - (reached[at] - weights[at])) / weights[at])


def score_targets(
    logits: NDArray[np.float32], targets: Sequence[int], n_tokens: int
) -> tuple[list[float], list[int]]:
    """Return the logprob of each target after logits (n, V), and its rank, 1 for the likeliest.

    Of equal logits those with a lower id come first. Ids from `n_tokens` on are not counted.
    """
    logprobs, ranks = list[float](), list[int]()
    for row, target in zip(logits, targets, strict=True):
        logprobs.append(float(row[target]) - log_normalizer(row))
        tokens = row[:n_tokens]
        n_higher = (tokens > row[target]).sum() + (tokens[:target] == row[target]).sum()
        ranks.append(1 + int(n_higher))
    return logprobs, ranks
