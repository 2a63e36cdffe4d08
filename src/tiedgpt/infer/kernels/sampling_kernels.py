"""From a row of logits to a token: bias, penalties, filters, and a draw; or a token's rank.

`sampling.py` makes the rows. No filter sorts the vocabulary: quickselect finds the last score kept.
Masses are in float32, and in float64 where their error could change the tokens kept or drawn.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES, LARGEST, ROUNDING, SMALLEST, SUM_BLOCK
from tiedgpt.infer.kernels.simd import jit
from tiedgpt.infer.kernels.work_stealing import claim_chunks, end, is_over

PIVOT_SAMPLE = 64
"""Scores that a pivot is taken from."""
NONE = np.float32(-np.inf)


class Candidates(NamedTuple):
    """The tokens that may still be drawn, side by side, and scratch of the same size."""

    ids: Any
    """The bits of int32."""
    scores: Any
    weights: Any
    """Their masses in float32."""
    spare_scores: Any
    spare_weights: Any


class Scale(NamedTuple):
    """The scale of scores: probabilities are proportional to e^((score - top) / temperature)."""

    top: Any
    """The highest score; its mass is 1."""
    temperature: Any
    factor: Any
    """The temperature's inverse in float32."""
    error: Any
    """Error of an exponent x in float32, as a share of |x|; 0: masses are in float64."""


@jit
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


@jit
def _exponentials(scores, n, top, factor, weights):
    """Write e^((score - top) * factor) to weights; return their sum, in float32 by blocks."""
    total = 0.0
    for block in range(0, n, SUM_BLOCK):
        block_sum = vec.splat(np.float32(0.0))
        for at in range(block, min(block + SUM_BLOCK, n), LANES):
            e = vec.exp(vec.shift(vec.load(scores, at), top, factor))
            vec.store(weights, at, e)
            block_sum = vec.add(block_sum, e)
        total += vec.total(block_sum)
    return total


@jit
def _scale(temperature, top):
    """Return the scale of a row's scores, with masses in float32."""
    factor = np.float32(max(1 / temperature, SMALLEST))
    is_extreme = max(temperature, abs(top)) > 1e30
    error = 7e-8 if temperature == 1 else 2e-7
    return Scale(top, temperature, factor, np.float64(np.inf) if is_extreme else error)


@jit
def _exact(scale):
    """Return the scale with masses in float64."""
    return Scale(scale.top, scale.temperature, scale.factor, 0.0)


@jit
def _mass(score, scale):
    """Return e^((score - top) / temperature)."""
    return math.exp((np.float64(score) - np.float64(scale.top)) / scale.temperature)


@jit
def _error(mass, rest, share, n, scale):
    """Return a bound of the error of `mass - share * (mass + rest)`, sums of n masses in all.

    An exponential in float32 is within 1.4e-7 of itself, and its exponent x within `scale.error` of
    |x|. In a sum s of masses e^x, the mean of |x| is at most log n - log s: it is the entropy of
    their shares, less log s.
    """
    mass, rest = max(mass, SMALLEST), max(rest, SMALLEST)
    most = math.log(n) + 2
    mass_error = mass * scale.error * (most - min(math.log(mass), 0.0))
    rest_error = rest * scale.error * (most - min(math.log(rest), 0.0))
    return (1 - share) * mass_error + share * rest_error


@jit
def _sum(scores, weights, begin, end, scale):
    """Return the sum of masses begin..end - 1; `begin` is a multiple of LANES."""
    total = vec.splat64(0.0)
    if scale.error > 0:
        for at in range(begin, end, LANES):
            total = vec.add64(total, vec.widen(vec.load(weights, at)))
    else:
        for at in range(begin, end, LANES):
            total = vec.add64(total, vec.exp64(vec.load(scores, at), scale.top, scale.temperature))
    return vec.total64(total)


@jit
def _score_at(mass, scale):
    """Return the score of a mass, a finite float32."""
    score = scale.top + math.log(max(mass, SMALLEST)) * scale.temperature
    return np.float32(min(max(score, -LARGEST), LARGEST))


@jit
def _measure(scores, weights, n, pivot, scale):
    """Return the sum of the masses of scores >= pivot, and how many are equal to it."""
    total, n_equal = vec.splat64(0.0), 0
    for at in range(0, n, LANES):
        score = vec.load(scores, at)
        n_equal += vec.count_bits(vec.equal(score, pivot))
        if scale.error > 0:
            mass = vec.widen(vec.load(weights, at))
        else:
            mass = vec.exp64(score, scale.top, scale.temperature)
        total = vec.add_masked64(total, mass, vec.at_least(score, pivot))
    return vec.total64(total), n_equal


@jit
def _partition(scores, weights, n, pivot, above, tokens):
    """Write the scores above or below a pivot, with their weights, to the spare; return n."""
    n_kept = 0
    for at in range(0, n, LANES):
        score, weight = vec.load(scores, at), vec.load(weights, at)
        those = vec.above(score, pivot if above else NONE)
        if not above:
            those ^= vec.at_least(score, pivot)
        vec.compress(tokens.spare_scores, n_kept, score, those)
        vec.compress(tokens.spare_weights, n_kept, weight, those)
        n_kept += vec.count_bits(those)
    vec.store(tokens.spare_scores, n_kept, vec.splat(NONE))
    vec.store(tokens.spare_weights, n_kept, vec.splat(np.float32(0.0)))
    return n_kept


@jit
def _kth(tokens, n, k):
    """Return the k-th highest of n scores; -inf if fewer are above -inf."""
    scores, pivot = tokens.scores, tokens.scores[0]
    for at in range(0, n, n // PIVOT_SAMPLE + 1):
        pivot = max(pivot, scores[at])
    while n > 0:
        n_above, n_equal = 0, 0
        for at in range(0, n, LANES):
            score = vec.load(scores, at)
            n_above += vec.count_bits(vec.above(score, pivot))
            n_equal += vec.count_bits(vec.equal(score, pivot))
        if n_above < k <= n_above + n_equal:
            return pivot
        n = _partition(scores, scores, n, pivot, n_above >= k, tokens)
        if n_above < k:
            k -= n_above + n_equal
        scores = tokens.spare_scores
        pivot = scores[n // 2]
    return NONE


@jit
def _nucleus(tokens, n, share, scale):
    """Find the highest score such that the scores from it on reach this share of the probability.

    Return it, and how many scores equal to it are needed beside all above it. Masses are in
    float64 as soon as those in float32 cannot tell.
    """
    scores, weights, n_left = tokens.scores, tokens.weights, n
    total = _sum(scores, weights, 0, n, scale)
    target, threshold = share * total * (1 - ROUNDING), NONE
    reached, limit = 0.0, np.float32(np.inf)  # the mass of scores >= limit
    pivot = _score_at((1 - share) * total / n, scale)  # all below it together stay out
    while n_left > 0:
        mass, n_equal = _measure(scores, weights, n_left, pivot, scale)
        one = _mass(pivot, scale)
        mass += reached
        above = mass - n_equal * one
        if scale.error > 0:
            error = _error(mass, total - above, share, n, scale)
            is_near = min(abs(mass - target), abs(above - target)) <= error
            if is_near or (n_equal > 1 and above < target < mass):
                scale = _exact(scale)
                reached, _ = _measure(tokens.scores, tokens.weights, n, limit, scale)
                target = share * _sum(tokens.scores, tokens.weights, 0, n, scale) * (1 - ROUNDING)
                continue
        if above >= target:
            threshold = pivot
        elif mass >= target:
            return pivot, max(1, math.ceil((target - above) / one))
        else:
            reached, limit = mass, pivot
        n_left = _partition(scores, weights, n_left, pivot, above >= target, tokens)
        scores, weights = tokens.spare_scores, tokens.spare_weights
        pivot = scores[n_left // 2]
    return threshold, 0


@jit
def _keep(tokens, n, threshold, ties):
    """Keep tokens with scores above a threshold, and the first `ties` of those at it; return n.

    None with -inf is kept.
    """
    ids, scores, weights, n_kept = tokens.ids, tokens.scores, tokens.weights, 0
    ties = ties if threshold > NONE else 0
    for at in range(0, n, LANES):
        token, score, weight = vec.load(ids, at), vec.load(scores, at), vec.load(weights, at)
        equal = vec.equal(score, threshold)
        while vec.count_bits(equal) > ties:  # without the last of them
            last = LANES - 1
            while not equal >> last:
                last -= 1
            equal ^= 1 << last
        ties -= vec.count_bits(equal)
        those = vec.above(score, threshold) | equal
        vec.compress(ids, n_kept, token, those)
        vec.compress(scores, n_kept, score, those)
        vec.compress(weights, n_kept, weight, those)
        n_kept += vec.count_bits(those)
    vec.store(scores, n_kept, vec.splat(NONE))
    vec.store(weights, n_kept, vec.splat(np.float32(0.0)))
    return n_kept


@jit
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
    return np.float32(max(top - deviations * math.sqrt(max(variance, 0.0)), -LARGEST))


@jit
def _exclude_top_choices(row, tokens, n, scale, spared):
    """Apply XTC; return how many tokens are left."""
    ids, scores = tokens.ids.view(np.int32), tokens.scores
    total = _sum(scores, scores, 0, n, _exact(scale))
    least = _score_at(row.xtc_threshold * total, scale)
    last, n_top = 0, 0
    for at in range(n):
        if scores[at] >= least:
            last = at if n_top == 0 or scores[at] <= scores[last] else last
            n_top += 1
    for at in range(n if n_top > 1 else 0):
        if scores[at] >= least and at != last:
            for token in spared[row.spared : row.spared_end]:
                if ids[at] == token:
                    return n
    n_kept = 0
    for at in range(n):
        if scores[at] < least or at == last:
            ids[n_kept], scores[n_kept] = ids[at], scores[at]
            n_kept += 1
    vec.store(scores, n_kept, vec.splat(NONE))
    return n_kept


@jit
def _filter(row, n, top, changed, tokens, spared):
    """Leave the tokens that may be drawn, and return their number and their scale.

    The order is that of `sampling.SAMPLING_STAGES`.
    """
    scores, weights = tokens.scores, tokens.weights
    for at in range(0, n, LANES):
        vec.store(tokens.ids, at, vec.count_from(at))
    if row.top_n_sigma > 0:
        n = _keep(tokens, n, _below(scores, n, top, row.top_n_sigma), n)
    if 0 < row.top_k < n:
        n = _keep(tokens, n, _kth(tokens, n, int(row.top_k)), n)
    scale = _scale(row.temperature, top)
    if changed or scale.factor != 1:
        _exponentials(scores, n, top, scale.factor, weights)
    if row.top_p < 1:
        threshold, ties = _nucleus(tokens, n, row.top_p, scale)
        n = _keep(tokens, n, threshold, ties)
    if row.min_p > 0:
        n = _keep(tokens, n, _score_at(row.min_p, scale), n)
    if row.xtc_uniform < row.xtc_probability:
        n = _exclude_top_choices(row, tokens, n, scale, spared)
        for at in range(n):
            top = scores[at] if at == 0 else max(top, scores[at])
        scale = _scale(row.temperature, top)
        _exponentials(scores, n, scale.top, scale.factor, weights)
    return n, scale


@jit
def _draw(tokens, n, uniform, scale):
    """Return the index at which the running sum of masses passes this share of the whole.

    It is -1 if sums in float32 cannot tell.
    """
    scores, weights, last = tokens.scores, tokens.weights, 0
    total = _sum(scores, weights, 0, n, scale)
    remaining = uniform * total * (1 - ROUNDING)
    error = _error(remaining, total - remaining, uniform, n, scale)
    for block in range(0, n, SUM_BLOCK):
        stop = min(block + SUM_BLOCK, n)
        block_mass = _sum(scores, weights, block, stop, scale)
        if remaining >= block_mass and stop < n:
            remaining -= block_mass
            continue
        for at in range(block, stop):
            mass = np.float64(weights[at]) if error > 0 else _mass(scores[at], scale)
            if remaining < mass:
                return -1 if error > min(remaining, mass - remaining) else at
            remaining -= mass
            last = at if mass > 0 else last
    return -1 if error > 0 else last  # rounding


@jit
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


@jit
def _first(scores, top):
    """Return the first index of the largest score."""
    at = 0
    while not vec.equal(vec.load(scores, at), top):
        at += LANES
    while scores[at] != top:
        at += 1
    return at


@jit
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


@jit
def _fill(row, size, lists, scratch):
    """Choose or rank the token of a row of `size` logits."""
    logits, n = vec.array_at(row.address, size), row.n_tokens
    tokens = Candidates(scratch[0], scratch[1], scratch[2], scratch[3], scratch[4])
    scores = tokens.scores
    top = _copy(logits, scores)
    log_total = top + math.log(_exponentials(scores, size, top, np.float32(1.0), tokens.weights))
    if row.token >= 0:
        row.rank = _rank(scores, n, row.token)
    else:
        changed = n < size or row.bias < row.bias_end or row.seen < row.seen_end
        if changed:
            _adjust(row, scores, scratch[5].view(np.int32), lists)
            top = _copy(scores[:n], scores)
        row.highest = top
        if not math.isfinite(top):
            return
        if row.temperature == 0:
            row.token = _first(scores, top)
        else:
            n, scale = _filter(row, n, top, changed, tokens, lists.spared)
            at = _draw(tokens, n, row.uniform, scale)
            if at < 0:
                at = _draw(tokens, n, row.uniform, _exact(scale))
            row.token, row.n_kept = tokens.ids.view(np.int32)[at], n
    row.logprob = np.float64(logits[row.token]) - log_total


@jit
def fill_rows(control, rows, size, lists, scratch):
    """Choose or rank the token of each row."""
    if not is_over(control):
        for i in claim_chunks(control, 0, len(rows)):
            _fill(rows[i], size, lists, scratch[control.me])
        end(control)
