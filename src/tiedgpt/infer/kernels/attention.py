"""Attention of new positions over a cache, whose cost grows with the filled length only.

Keys lie in blocks of 64 positions (C/64, D/H, 64), so that a register holds one dimension of 16
keys, and a block is read from its beginning to its end; values lie by position (C, D/H). Both are
float32, bf16 (as uint16), or int8 with a scale for each position.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from tiedgpt.infer.kernels.arithmetic import to_bf16
from tiedgpt.infer.kernels.attention_tiles import mix1, mix4, score1, score4
from tiedgpt.infer.kernels.simd import LANES
from tiedgpt.infer.kernels.vectors import (
    add16,
    bits_of_float,
    exp16,
    fetch16,
    filled16,
    float_of_bits,
    largest16,
    load16,
    max16,
    nearest,
    scale16,
    shift16,
    store16,
    total16,
)  # fmt: skip

SPAN = 64
"""Positions whose scores are computed together; room for positions is a multiple of it."""
TOGETHER = 4
"""Queries of one sequence that read keys and values together."""
NONE = np.float32(-np.inf)


def keep(x: Any, n: int, position: int, keys: Any, key_scales: Any) -> None:
    """Write a key (D/H,) at its position."""


@overload(keep, inline="always")
def _keep(x, n, position, keys, key_scales):
    if keys.dtype == types.int8:

        def to_int8(x, n, position, keys, key_scales):
            block, lane = position // SPAN, position % SPAN
            scale = _scale(x, n)
            key_scales[position] = scale
            inverse = np.float32(1.0) / scale if scale > 0 else np.float32(0.0)
            for d in range(n):
                keys[block, d, lane] = np.int8(np.int32(nearest(x[d] * inverse)))

        return to_int8
    if keys.dtype == types.uint16:

        def rounded(x, n, position, keys, key_scales):
            block, lane = position // SPAN, position % SPAN
            for d in range(n):
                keys[block, d, lane] = to_bf16(x[d])

        return rounded

    def copied(x, n, position, keys, key_scales):
        block, lane = position // SPAN, position % SPAN
        for d in range(n):
            keys[block, d, lane] = x[d]

    return copied


def keep_value(x: Any, n: int, position: int, values: Any, value_scales: Any) -> None:
    """Write a value (D/H,) at its position."""


@overload(keep_value, inline="always")
def _keep_value(x, n, position, values, value_scales):
    if values.dtype == types.int8:

        def to_int8(x, n, position, values, value_scales):
            scale = _scale(x, n)
            value_scales[position] = scale
            inverse = np.float32(1.0) / scale if scale > 0 else np.float32(0.0)
            for d in range(n):
                values[position, d] = np.int8(np.int32(nearest(x[d] * inverse)))

        return to_int8
    if values.dtype == types.uint16:

        def rounded(x, n, position, values, value_scales):
            for d in range(n):
                values[position, d] = to_bf16(x[d])

        return rounded

    def copied(x, n, position, values, value_scales):
        for d in range(n):
            values[position, d] = x[d]

    return copied


@njit(error_model="numpy")
def _scale(x, n):
    largest = np.int32(0)
    for d in range(n):  # without the sign, bits are in the order of numbers, and NaN the largest
        largest = max(largest, bits_of_float(x[d]) & np.int32(0x7FFFFFFF))
    return float_of_bits(largest) / np.float32(127.0)


@njit(error_model="numpy")
def attend(
    queries, row, n, at, size, position, window, keys, values, key_scales, value_scales, scaled,
    after, p, mixed, out,
):  # fmt: skip
    """Attend from n queries (1 or 4), rows of `queries` from `row`, columns from `at`.

    They stand at `position` and after; each sees what is at or before it, `window` of it (0: all).
    The result goes to the same place of `out`. `after` are the keys that are wanted next. `p`
    (4, C) and `mixed` (4, D/H) are scratch. A query's result is the same whether it is read alone
    or with others: what it does not see adds zeros.
    """
    last = position + n - 1
    first = max(0, position - window + 1) if window else 0
    begin, end = first // SPAN * SPAN, (last // SPAN + 1) * SPAN
    stride, padded = queries.shape[1], values.shape[1]
    factor = np.float32(1.0 / math.sqrt(size))
    if n == 1 and scaled:
        for t in range(begin, end, LANES):
            fetch16(key_scales, t)
            fetch16(value_scales, t)
    for span in range(begin, end, SPAN):
        if n == TOGETHER:
            score4(
                queries, row * stride + at, stride, size, keys, span, padded, p, p.shape[1], values
            )
        else:
            score1(
                queries, row * stride + at, stride, size, keys, span, padded, p, p.shape[1], values
            )
    for query in range(n):
        stand = position + query
        low = max(0, stand - window + 1) if window else 0
        _soften(p[query], begin, low, stand, end, factor, key_scales, value_scales, scaled)
    for part in range(0, padded, SPAN):
        if n == TOGETHER:
            mix4(p, p.shape[1], first, last + 1, values, part, padded, mixed, after)
        else:
            mix1(p, p.shape[1], first, last + 1, values, part, padded, mixed, after)
    for query in range(n):
        for d in range(size):
            out[row + query, at + d] = mixed[query, d]


@njit(error_model="numpy")
def _soften(p, begin, low, high, end, factor, key_scales, value_scales, scaled):
    """Softmax of scores low..high; the others from `begin` to `end` become 0."""
    if scaled:
        for t in range(begin, end, LANES):
            store16(p, t, scale16(load16(p, t), load16(key_scales, t)))
    for t in range(begin, low):
        p[t] = NONE
    for t in range(high + 1, end):
        p[t] = NONE
    top = filled16(NONE)
    for t in range(begin, end, LANES):
        top = max16(top, load16(p, t))
    largest = largest16(top)
    total = filled16(np.float32(0.0))
    for t in range(begin, end, LANES):
        e = exp16(shift16(load16(p, t), largest, factor))
        store16(p, t, e)
        total = add16(total, e)
    inverse = filled16(np.float32(1.0) / total16(total))
    for t in range(begin, end, LANES):
        weight = scale16(load16(p, t), inverse)
        if scaled:
            weight = scale16(weight, load16(value_scales, t))
        store16(p, t, weight)
