"""Penalties and filters of the next token's logits (V,) in plain numpy.

Each computes the same as transformers under the same name; presence and frequency penalties are
those of OpenAI's API. Filters get the scores that are left, all above -inf, and return the indices
of those that may be drawn. They decide by the float32 scores and by sums in float64, and none sorts
the whole vocabulary. They define what `kernels/sampling_kernels.py` computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.infer.kernels.arguments import LARGEST, ROUNDING, SMALLEST, SUM_BLOCK

Array = NDArray[np.float32]
Ids = NDArray[np.intp]
FIRST_LOOK = 512
"""How many candidates are sorted at first; if they do not suffice, eight times as many."""


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
    ids, counts = ids[ids < len(scores)], counts[ids < len(scores)]
    scores[ids] -= (presence + frequency * counts).astype(np.float32)


def add_bias(scores: Array, bias: Mapping[int, float]) -> None:
    """Add a bias to the logits of single tokens (in place)."""
    for token, value in bias.items():
        if token < len(scores):
            scores[token] += value


def masses(scores: Array, temperature: float) -> NDArray[np.float64]:
    """Return e^((score - highest) / temperature), which probabilities are proportional to."""
    return np.exp((scores.astype(np.float64) - scores.max()) / temperature)


def top_n_sigma(scores: Array, n: float) -> Ids:
    """Return the indices of scores at most n standard deviations below the highest.

    Tang et al. 2024, "Top-nσ: Not All Logits Are You Need".
    """
    deviation = float(scores.std(dtype=np.float64))
    return np.flatnonzero(scores >= _float32(float(scores.max()) - n * deviation))


def top_k(scores: Array, k: int) -> Ids:
    """Return the indices of the k highest scores, and of ties with the last of them."""
    k = min(k, len(scores))
    return np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[-k])


def top_p(scores: Array, temperature: float, mass: float) -> Ids:
    """Return the fewest indices, the likeliest first, that together reach this probability.

    Of equal scores, lower indices come first. Holtzman et al. 2020, "The Curious Case of Neural
    Text Degeneration".
    """
    p = masses(scores, temperature)
    return _until_mass(-scores, p, mass * p.sum() * (1 - ROUNDING))


def min_p(scores: Array, temperature: float, share: float) -> Ids:
    """Return the indices of at least this share of the likeliest one's probability.

    Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    return np.flatnonzero(scores >= _score_at(share, scores, temperature))


def xtc(scores: Array, temperature: float, threshold: float, spared: NDArray[np.bool_]) -> Ids:
    """Return the indices without those of at least this probability, except the least likely one.

    Of equal scores, the last index stays. All stay if a spared one would be excluded. "Exclude Top
    Choices", text-generation-webui's pull request 6335.
    """
    least = threshold * masses(scores, temperature).sum()
    top_choices = np.flatnonzero(scores >= _score_at(least, scores, temperature))
    if len(top_choices) > 1:
        last = np.flatnonzero(scores == scores[top_choices].min())[-1]
        excluded = top_choices[top_choices != last]
        if not spared[excluded].any():
            return np.delete(np.arange(len(scores)), excluded)
    return np.arange(len(scores))


def _score_at(mass: float, scores: Array, temperature: float) -> np.float32:
    """Return the score with this mass, that of the highest being 1."""
    return _float32(float(scores.max()) + temperature * math.log(max(mass, SMALLEST)))


def _float32(number: float) -> np.float32:
    """Return the nearest finite float32."""
    return np.float32(min(max(number, -LARGEST), LARGEST))


def _until_mass(rank: Array, p: NDArray[np.float64], mass: float) -> Ids:
    """Return the indices lowest in `rank` up to that with which the sum of `p` reaches `mass`."""
    n = FIRST_LOOK
    while True:
        if n < len(rank):
            near = np.flatnonzero(rank <= np.partition(rank, n)[n])
        else:
            near = np.arange(len(rank))
        near = near[np.argsort(rank[near], kind="stable")]
        last = int(np.searchsorted(np.cumsum(p[near]), mass))
        if last < len(near) or len(near) == len(rank):
            return np.sort(near[: last + 1])
        n *= 8


def log_normalizer(logits: Array) -> float:
    """Return log sum exp(logits), which turns a logit into log P."""
    p: Array = logits - logits.max()
    return float(logits.max()) + math.log(np.exp(p, out=p).sum(dtype=np.float64))


def highest(values: NDArray[Any], k: int) -> Ids:
    """Return the indices of the k highest values (N,), the highest first."""
    k = min(k, len(values))
    indices = np.argpartition(values, len(values) - k)[len(values) - k :]
    return indices[np.argsort(-values[indices], kind="stable")]


def likeliest(logits: Array, k: int, n_tokens: int) -> list[tuple[int, float]]:
    """Return the k likeliest of the first `n_tokens` ids as (id, logprob), the likeliest first."""
    total = log_normalizer(logits)
    return [(int(i), float(logits[i]) - total) for i in highest(logits[:n_tokens], k)]


def draw(p: NDArray[np.float64], uniform: float) -> int:
    """Return the index at which the running sum of p passes a share, from [0, 1), of the whole.

    The sum is searched by blocks, then within one: a running sum over V takes ten times as long.
    """
    starts = np.arange(0, len(p), SUM_BLOCK)
    block, rest = _passing(np.add.reduceat(p, starts), uniform * (1 - ROUNDING))
    start = int(starts[block])
    within, _ = _passing(p[start : start + SUM_BLOCK], rest)
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
