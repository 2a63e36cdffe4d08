"""What is done with a row of logits: bias, penalties, filters, and a draw or a rank.

See `sampling.py`, which makes the rows. No filter sorts the vocabulary: quickselect finds the key
of the last token that is kept.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.vectors import (
    above16,
    add16,
    array_at,
    at_least16,
    compress16,
    count16,
    count_bits,
    equal16,
    exp16,
    filled16,
    larger16,
    largest16,
    load16,
    masked16,
    shift16,
    store16,
    total16,
)  # fmt: skip
from tiedgpt.infer.kernels.work_stealing import claimed, end, is_over

BLOCK = 256
"""Weights that are summed in float32; sums of blocks are added in float64."""
SAMPLE = 64
"""Keys that a pivot is taken from."""
NONE = np.float32(-np.inf)
TOP_K, TOP_P, MIN_P, TYPICAL_P = range(4)
SMALLEST = float(np.finfo(np.float32).tiny)


@njit(error_model="numpy")
def _copy(logits, scores):
    """Copy a row, with -inf behind it; return its largest, NaN if one is."""
    n = len(logits)
    whole = n // (2 * LANES) * (2 * LANES)
    top, other = filled16(NONE), filled16(NONE)
    for at in range(0, whole, 2 * LANES):
        a, b = load16(logits, at), load16(logits, at + LANES)
        store16(scores, at, a)
        store16(scores, at + LANES, b)
        top, other = larger16(top, a), larger16(other, b)
    for i in range(whole, whole + 2 * LANES):
        scores[i] = logits[i] if i < n else NONE
    top = larger16(top, load16(scores, whole))
    other = larger16(other, load16(scores, whole + LANES))
    return largest16(larger16(top, other))


@njit(error_model="numpy")
def _exponentials(scores, n, top, factor, weights):
    """Write e^((score - top) * factor) to weights; return their sum."""
    total = 0.0
    for block in range(0, n, BLOCK):
        part = filled16(np.float32(0.0))
        for at in range(block, min(block + BLOCK, n), LANES):
            e = exp16(shift16(load16(scores, at), top, factor))
            store16(weights, at, e)
            part = add16(part, e)
        total += total16(part)
    return total


@njit(error_model="numpy")
def _total(weights, begin, end):
    """Return the sum of weights begin..end - 1, of one block."""
    part = filled16(np.float32(0.0))
    for at in range(begin, end, LANES):
        part = add16(part, load16(weights, at))
    return np.float64(total16(part))


@njit(error_model="numpy")
def _sum(weights, n):
    total = 0.0
    for block in range(0, n, BLOCK):
        total += _total(weights, block, min(block + BLOCK, n))
    return total


@njit(error_model="numpy")
def _sums_beside(keys, weights, n, pivot):
    """Return the sums of weights whose keys are > pivot, and >= pivot."""
    above, at_least = 0.0, 0.0
    for block in range(0, n, BLOCK):
        one, two = filled16(np.float32(0.0)), filled16(np.float32(0.0))
        for at in range(block, min(block + BLOCK, n), LANES):
            key, weight = load16(keys, at), load16(weights, at)
            one = add16(one, masked16(weight, above16(key, pivot)))
            two = add16(two, masked16(weight, at_least16(key, pivot)))
        above += total16(one)
        at_least += total16(two)
    return above, at_least


@njit(error_model="numpy")
def _partition(keys, weights, n, pivot, above, out_keys, out_weights):
    """Write keys above or below a pivot, and their weights, side by side; return how many."""
    kept = 0
    for at in range(0, n, LANES):
        key, weight = load16(keys, at), load16(weights, at)
        those = above16(key, pivot if above else NONE)
        if not above:
            those ^= at_least16(key, pivot)
        compress16(out_keys, kept, key, those)
        compress16(out_weights, kept, weight, those)
        kept += count_bits(those)
    store16(out_keys, kept, filled16(NONE))
    store16(out_weights, kept, filled16(np.float32(0.0)))
    return kept


@njit(error_model="numpy")
def _threshold(keys, weights, n, target, pivot, spare_keys, spare_weights):
    """Find the highest key with which the weights of the highest keys together reach `target`.

    Return it, and with how many of its own kind it does: all keys above it are needed, too. The
    first guess is `pivot`.
    """
    reached, threshold = 0.0, NONE
    while n > 0:
        above, at_least = _sums_beside(keys, weights, n, pivot)
        go_up = reached + above >= target
        if go_up:
            threshold = pivot
        elif pivot == NONE:
            break
        elif reached + at_least >= target:
            weight = (at_least - above) / _count(keys, n, pivot)
            return pivot, max(1, math.ceil((target - reached - above) / weight))
        else:
            reached += at_least
        n = _partition(keys, weights, n, pivot, go_up, spare_keys, spare_weights)
        keys, weights = spare_keys, spare_weights
        pivot = keys[n // 2]
    return threshold, 0


@njit(error_model="numpy")
def _count(keys, n, key):
    count = 0
    for at in range(0, n, LANES):
        count += count_bits(equal16(load16(keys, at), key))
    return count


@njit(error_model="numpy")
def _keep(keys, threshold, ties, n, ids, scores, weights):
    """Keep tokens with keys above a threshold, and the first `ties` of those at it; return n."""
    kept = 0
    for at in range(0, n, LANES):
        key = load16(keys, at)
        equal = equal16(key, threshold)
        while count_bits(equal) > ties:  # without the last of them
            last = LANES - 1
            while not equal >> last:
                last -= 1
            equal ^= 1 << last
        ties -= count_bits(equal)
        those = above16(key, threshold) | equal
        token, score, weight = load16(ids, at), load16(scores, at), load16(weights, at)
        compress16(ids, kept, token, those)
        compress16(scores, kept, score, those)
        compress16(weights, kept, weight, those)
        kept += count_bits(those)
    store16(scores, kept, filled16(NONE))
    store16(weights, kept, filled16(np.float32(0.0)))
    return kept


@njit(error_model="numpy")
def _filter(row, n, top, changed, ids, scores, weights, distances, spare_keys, spare_weights):
    """Leave the tokens that may be drawn, with their weights; return how many."""
    factor = np.float32(max(1 / row.temperature, SMALLEST))
    for at in range(0, n, LANES):
        store16(ids, at, count16(at))
    for kind in range(4):
        keys, threshold, ties, target = scores, NONE, n, 0.0
        if kind == TOP_K:
            if not 0 < row.top_k < n:
                continue
            weights[:n], changed = np.float32(1.0), True
            target = np.float64(row.top_k)
            pivot = scores[0]
            for at in range(0, n, n // SAMPLE + 1):
                pivot = max(pivot, scores[at])
        elif kind == TOP_P:
            if changed or factor != 1:
                _exponentials(scores, n, top, factor, weights)
            if row.top_p >= 1:
                continue
            total = _sum(weights, n)
            target = row.top_p * total  # tokens of less than this together stay out:
            pivot = np.float32(top + math.log(max((total - target) / n, SMALLEST)) / factor)
        elif kind == MIN_P:
            keys, threshold = weights, np.float32(row.min_p)
        elif row.typical_p < 1:
            target = row.typical_p * _surprise(scores, weights, n, top, factor, distances)
            keys, pivot = distances, distances[n // 2]
        else:
            continue
        if kind != MIN_P:
            threshold, ties = _threshold(keys, weights, n, target, pivot, spare_keys, spare_weights)
            if kind == TOP_K and threshold > NONE:
                ties = n
        n = _keep(keys, threshold, ties, n, ids, scores, weights)
    return n


@njit(error_model="numpy")
def _surprise(scores, weights, n, top, factor, out):
    """Write minus the distance of each token's surprise from the expected one; return the total."""
    total, mean = _sum(weights, n), 0.0
    for i in range(n):
        if weights[i] > 0:
            mean += weights[i] * np.float64((scores[i] - top) * factor)
    center = np.float32(mean / total)
    for i in range(n):
        out[i] = -abs((scores[i] - top) * factor - center) if weights[i] > 0 else NONE
    out[n : n + LANES] = NONE
    return total


@njit(error_model="numpy")
def _draw(weights, n, uniform):
    """Return where the running sum of weights passes this share of the whole."""
    left = uniform * _sum(weights, n)
    for block in range(0, n, BLOCK):
        stop = min(block + BLOCK, n)
        part = _total(weights, block, stop)
        if left < part:
            for i in range(block, stop):
                left -= weights[i]
                if left < 0:
                    return i
            left = 0.0  # rounding: the next that can be drawn
        else:
            left -= part
    while weights[n - 1] == 0:  # rounding: the last
        n -= 1
    return n - 1


@njit(error_model="numpy")
def _adjust(row, scores, counts, seen, bias_ids, bias):
    """Apply bias and penalties to a row's scores; `counts` are 0 before and after."""
    for at in range(row.bias, row.bias_end):
        scores[bias_ids[at]] += bias[at]
    penalty = np.float32(row.repetition)
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
            penalties = row.presence + row.frequency * counts[token]
            scores[token] -= np.float32(penalties)
            counts[token] = 0


@njit(error_model="numpy")
def _first(scores, top):
    """Return where the largest score stands first."""
    at = 0
    while not equal16(load16(scores, at), top):
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
        rank += count_bits(at_least16(load16(scores, at), score))
    for at in range(before, n, LANES):
        rank += count_bits(above16(load16(scores, at), score))
    for at in range(before, lower):
        rank += scores[at] == score
    return rank


@njit(error_model="numpy")
def _fill(row, size, seen, bias_ids, bias, own):
    logits, n = array_at(row.address, size), row.n_tokens
    scores, weights, ids = own[0], own[1], own[2]
    top = _copy(logits, scores)
    log_total = top + math.log(_exponentials(scores, size, top, np.float32(1.0), weights))
    if row.token >= 0:
        row.rank = _rank(scores, n, row.token)
    else:
        changed = n < size or row.bias < row.bias_end or row.seen < row.seen_end
        if changed:
            _adjust(row, scores, own[6].view(np.int32), seen, bias_ids, bias)
            top = _copy(scores[:n], scores)
        row.highest = top
        if not math.isfinite(top):
            return
        if row.temperature == 0:
            row.token = _first(scores, top)
        else:
            n = _filter(row, n, top, changed, ids, scores, weights, own[3], own[4], own[5])
            row.token = ids.view(np.int32)[_draw(weights, n, row.uniform)]
    row.logprob = np.float64(logits[row.token]) - log_total


@njit(error_model="numpy")
def fill_rows(control, rows, size, seen, bias_ids, bias, scratch):
    """Choose or rank each row's token."""
    if not is_over(control):
        for i in claimed(control, 0, len(rows)):
            _fill(rows[i], size, seen, bias_ids, bias, scratch[control.me])
        end(control)
