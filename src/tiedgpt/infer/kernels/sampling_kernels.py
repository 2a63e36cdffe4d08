"""From a row of logits to a token: bias, penalties, filters, and a draw; or a token's rank.

`sampling.py` makes the rows. No filter sorts the vocabulary: quickselect finds the last key kept.
Sums that decide which tokens top-p keeps are in float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tiedgpt.infer import filters
from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.work_stealing import claim_chunks, end, is_over

BLOCK = 256
"""Weights that are summed in float32; sums of blocks are added in float64."""
SAMPLE = 64
"""Keys that a pivot is taken from."""
NONE = np.float32(-np.inf)
TOP_N_SIGMA, TOP_K, TOP_P, MIN_P = range(4)
SMALLEST = float(np.finfo(np.float32).tiny)
ROUNDING = filters.ROUNDING


class Candidates(NamedTuple):
    """The tokens that may still be drawn, side by side, and scratch of the same size."""

    ids: Any
    """The bits of int32."""
    scores: Any
    weights: Any
    """Proportional to the probabilities."""
    spare_keys: Any


@njit(error_model="numpy")
def _copy(logits, scores):
    """Copy a row, with -inf behind it; return its largest, NaN if one is."""
    n = len(logits)
    n_paired = n // (2 * LANES) * (2 * LANES)
    top, other = vec.splat(NONE), vec.splat(NONE)
    for at in range(0, n_paired, 2 * LANES):
        a, b = vec.load(logits, at), vec.load(logits, at + LANES)
        vec.store(scores, at, a)
        vec.store(scores, at + LANES, b)
        top, other = vec.larger(top, a), vec.larger(other, b)
    for i in range(n_paired, n_paired + 2 * LANES):
        scores[i] = logits[i] if i < n else NONE
    top = vec.larger(top, vec.load(scores, n_paired))
    other = vec.larger(other, vec.load(scores, n_paired + LANES))
    return vec.largest(vec.larger(top, other))


@njit(error_model="numpy")
def _exponentials(scores, n, top, factor, weights):
    """Write e^((score - top) * factor) to weights; return their sum."""
    total = 0.0
    for block in range(0, n, BLOCK):
        block_sum = vec.splat(np.float32(0.0))
        for at in range(block, min(block + BLOCK, n), LANES):
            e = vec.exp(vec.shift(vec.load(scores, at), top, factor))
            vec.store(weights, at, e)
            block_sum = vec.add(block_sum, e)
        total += vec.total(block_sum)
    return total


@njit(error_model="numpy")
def _total(weights, begin, end):
    """Return the sum of weights begin..end - 1, of one block."""
    block_sum = vec.splat(np.float32(0.0))
    for at in range(begin, end, LANES):
        block_sum = vec.add(block_sum, vec.load(weights, at))
    return np.float64(vec.total(block_sum))


@njit(error_model="numpy")
def _sum(weights, n):
    """Return the sum of n weights."""
    total = 0.0
    for block in range(0, n, BLOCK):
        total += _total(weights, block, min(block + BLOCK, n))
    return total


@njit(error_model="numpy")
def _count(keys, n, pivot):
    """Return how many keys are > pivot and equal to it."""
    n_above, n_equal = 0, 0
    for at in range(0, n, LANES):
        key = vec.load(keys, at)
        n_above += vec.count_bits(vec.above(key, pivot))
        n_equal += vec.count_bits(vec.equal(key, pivot))
    return n_above, n_equal


@njit(error_model="numpy")
def _masses(keys, n, pivot, temperature, top):
    """Return the sums, in float64, of e^(key / temperature - top) of keys > pivot and of all."""
    above, total = vec.splat64(0.0), vec.splat64(0.0)
    for at in range(0, n, LANES):
        key = vec.load(keys, at)
        mass = vec.exp64(key, temperature, top)
        above = vec.add_masked64(above, mass, vec.above(key, pivot))
        total = vec.add64(total, mass)
    return vec.total64(above), vec.total64(total)


@njit(error_model="numpy")
def _partition(keys, n, pivot, above, spare):
    """Write the keys above or below a pivot to the spare; return how many."""
    n_kept = 0
    for at in range(0, n, LANES):
        key = vec.load(keys, at)
        those = vec.above(key, pivot if above else NONE)
        if not above:
            those ^= vec.at_least(key, pivot)
        vec.compress(spare, n_kept, key, those)
        n_kept += vec.count_bits(those)
    vec.store(spare, n_kept, vec.splat(NONE))
    return n_kept


@njit(error_model="numpy")
def _threshold(keys, n, pivot, count, share, temperature, top, spare):
    """Find the highest key such that the keys from it on are `count`, or reach this share.

    The share is of the probability at a temperature, for a `count` of 0. Return the key, and how
    many keys equal to it are needed beside all keys above it. The first guess is `pivot`.
    """
    threshold, reached, target = NONE, 0.0, np.float64(count)
    while n > 0:
        n_above, n_equal = _count(keys, n, pivot)
        above, one = np.float64(n_above), 1.0
        if not count:
            above, total = _masses(keys, n, pivot, temperature, top)
            one = math.exp(np.float64(pivot / temperature) - np.float64(top))
            target = target or share * total * (1 - ROUNDING)
        go_up = reached + above >= target
        if go_up:
            threshold = pivot
        elif pivot == NONE:
            break
        elif reached + above + one * n_equal >= target:
            return pivot, max(1, math.ceil((target - reached - above) / one))
        else:
            reached += above + one * n_equal
        n = _partition(keys, n, pivot, go_up, spare)
        keys = spare
        pivot = keys[n // 2]
    return threshold, 0


@njit(error_model="numpy")
def _keep(keys, threshold, ties, n, tokens):
    """Keep tokens with keys above a threshold, and the first `ties` of those at it; return n."""
    ids, scores, weights, n_kept = tokens.ids, tokens.scores, tokens.weights, 0
    for at in range(0, n, LANES):
        key = vec.load(keys, at)
        equal = vec.equal(key, threshold)
        while vec.count_bits(equal) > ties:  # without the last of them
            last = LANES - 1
            while not equal >> last:
                last -= 1
            equal ^= 1 << last
        ties -= vec.count_bits(equal)
        those = vec.above(key, threshold) | equal
        token, score, weight = vec.load(ids, at), vec.load(scores, at), vec.load(weights, at)
        vec.compress(ids, n_kept, token, those)
        vec.compress(scores, n_kept, score, those)
        vec.compress(weights, n_kept, weight, those)
        n_kept += vec.count_bits(those)
    vec.store(scores, n_kept, vec.splat(NONE))
    vec.store(weights, n_kept, vec.splat(np.float32(0.0)))
    return n_kept


@njit(error_model="numpy")
def _below(scores, n, top, deviations):
    """Return the score that is so many standard deviations below the highest; -inf is no score."""
    count, total, squares = 0, 0.0, 0.0
    for at in range(n):
        if scores[at] > NONE:
            distance = np.float64(top) - np.float64(scores[at])
            count += 1
            total += distance
            squares += distance * distance
    variance = squares / count - (total / count) ** 2
    return np.float32(top - deviations * math.sqrt(max(variance, 0.0)))


@njit(error_model="numpy")
def _filter(row, n, top, changed, tokens):
    """Leave the tokens that may be drawn, with their weights; return how many."""
    scores, weights = tokens.scores, tokens.weights
    factor = np.float32(max(1 / row.temperature, SMALLEST))
    temperature = np.float32(row.temperature)
    for at in range(0, n, LANES):
        vec.store(tokens.ids, at, vec.count_from(at))
    for filter_id in range(4):
        keys, threshold, ties, count = scores, NONE, n, 0
        if filter_id == TOP_N_SIGMA:
            if row.top_n_sigma <= 0:
                continue
            threshold = _below(scores, n, top, row.top_n_sigma)
        elif filter_id == TOP_K:
            if not 0 < row.top_k < n:
                continue
            count, changed = int(row.top_k), True
            pivot = scores[0]
            for at in range(0, n, n // SAMPLE + 1):
                pivot = max(pivot, scores[at])
        elif filter_id == TOP_P:
            if changed or factor != 1:
                _exponentials(scores, n, top, factor, weights)
            if row.top_p >= 1:
                continue
            rest = (1 - row.top_p) * _sum(weights, n)  # tokens of this together stay out:
            pivot = np.float32(top + math.log(max(rest / n, SMALLEST)) / factor)
        else:
            keys, threshold = weights, np.float32(row.min_p)
        if filter_id in (TOP_K, TOP_P):
            threshold, ties = _threshold(
                keys, n, pivot, count, row.top_p, temperature, top / temperature, tokens.spare_keys
            )
            if filter_id == TOP_K and threshold > NONE:
                ties = n
        n = _keep(keys, threshold, ties, n, tokens)
    return n


@njit(error_model="numpy")
def _draw(weights, n, uniform):
    """Return the index at which the running sum of weights passes this share of the whole."""
    remaining = uniform * _sum(weights, n)
    for block in range(0, n, BLOCK):
        stop = min(block + BLOCK, n)
        block_sum = _total(weights, block, stop)
        if remaining < block_sum:
            for i in range(block, stop):
                remaining -= weights[i]
                if remaining < 0:
                    return i
            remaining = 0.0  # rounding: the next that can be drawn
        else:
            remaining -= block_sum
    while weights[n - 1] == 0:  # rounding: the last
        n -= 1
    return n - 1


@njit(error_model="numpy")
def _adjust(row, scores, counts, lists):
    """Apply bias and penalties to a row's scores; `counts` are 0 before and after."""
    for at in range(row.bias, row.bias_end):
        scores[lists.bias_ids[at]] += lists.bias[at]
    penalty, seen = np.float32(row.repetition_penalty), lists.seen
    for token in seen[row.seen : row.seen_end]:
        if not counts[token]:
            score = scores[token]
            scores[token] = score / penalty if score > 0 else score * penalty
            counts[token] = 1
    for token in seen[row.seen : row.seen_end]:
        counts[token] = 0
    generated = seen[row.generated : row.seen_end]
    for token in generated:
        counts[token] += 1
    for token in generated:
        if counts[token]:
            penalties = row.presence_penalty + row.frequency_penalty * counts[token]
            scores[token] -= np.float32(penalties)
            counts[token] = 0


@njit(error_model="numpy")
def _first(scores, top):
    """Return the first index of the largest score."""
    at = 0
    while not vec.equal(vec.load(scores, at), top):
        at += LANES
    while scores[at] != top:
        at += 1
    return at


@njit(error_model="numpy")
def _rank(scores, n, target):
    """Return a token's rank among n scores, from 1; of equal scores the lower id is first."""
    rank, score, lower = 1, scores[target], min(target, n)
    before = lower // LANES * LANES
    scores[n : n + LANES] = NONE
    for at in range(0, before, LANES):
        rank += vec.count_bits(vec.at_least(vec.load(scores, at), score))
    for at in range(before, n, LANES):
        rank += vec.count_bits(vec.above(vec.load(scores, at), score))
    for at in range(before, lower):
        rank += scores[at] == score
    return rank


@njit(error_model="numpy")
def _fill(row, size, lists, scratch):
    """Choose or rank the token of a row of `size` logits."""
    logits, n = vec.array_at(row.address, size), row.n_tokens
    tokens = Candidates(scratch[0], scratch[1], scratch[2], scratch[3])
    scores = tokens.scores
    top = _copy(logits, scores)
    log_total = top + math.log(_exponentials(scores, size, top, np.float32(1.0), tokens.weights))
    if row.token >= 0:
        row.rank = _rank(scores, n, row.token)
    else:
        changed = n < size or row.bias < row.bias_end or row.seen < row.seen_end
        if changed:
            _adjust(row, scores, scratch[4].view(np.int32), lists)
            top = _copy(scores[:n], scores)
        row.highest = top
        if not math.isfinite(top):
            return
        if row.temperature == 0:
            row.token = _first(scores, top)
        else:
            n = _filter(row, n, top, changed, tokens)
            row.token = tokens.ids.view(np.int32)[_draw(tokens.weights, n, row.uniform)]
    row.logprob = np.float64(logits[row.token]) - log_total


@njit(error_model="numpy")
def fill_rows(control, rows, size, lists, scratch):
    """Choose or rank the token of each row."""
    if not is_over(control):
        for i in claim_chunks(control, 0, len(rows)):
            _fill(rows[i], size, lists, scratch[control.me])
        end(control)
