"""Attention of new positions over the KV cache, whose cost grows with the filled length only.

Keys lie in blocks of 64 positions (C/64, D/H, 64), so that a register holds one dimension of 16
keys, and a block is read from its beginning to its end; values lie by position (C, D/H). Both are
float32, bf16 (as uint16), or int8 with a scale for each position. The two matmuls are made as those
of weights are (`microkernels.py`): 1 or 4 queries at a time.

One query alone waits for memory. So while it reads rows of 64 keys' numbers, it has the rows at the
same places of `after` fetched: the values that are read next; and with those the next head's keys.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.core import cgutils

from tiedgpt.infer.kernels.arguments import BLOCK, LANES, QUERIES
from tiedgpt.infer.kernels.microkernels import PANEL, PARTS, cleared, loaded
from tiedgpt.infer.kernels.quantize import convert
from tiedgpt.infer.kernels.simd import (
    ARRAY,
    f32,
    fma,
    i64,
    instructions,
    prefetch,
    splat,
    store,
    widened,
)  # fmt: skip
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
    scale16,
    shift16,
    store16,
    total16,
)  # fmt: skip

LINE = 64
"""Bytes of a cache line."""
NONE = np.float32(-np.inf)


@njit(error_model="numpy")
def append(key, value, n, position, keys, values, key_scales, value_scales, scaled):
    """Write a key and a value (D/H,) at their position of the KV cache."""
    block, column = position // BLOCK, position % BLOCK
    key_inverse = value_inverse = np.float32(1.0)
    if scaled:
        key_inverse = _set_scale(key, n, position, key_scales)
        value_inverse = _set_scale(value, n, position, value_scales)
    for d in range(n):
        keys[block, d, column] = convert(key[d], key_inverse, keys)
    for d in range(n):
        values[position, d] = convert(value[d], value_inverse, values)


@njit(error_model="numpy")
def _set_scale(x, n, position, scales):
    """Set the scale of x at its position; return the inverse."""
    largest = np.int32(0)
    for d in range(n):  # without the sign, bits are in the order of numbers, and NaN the largest
        largest = max(largest, bits_of_float(x[d]) & np.int32(0x7FFFFFFF))
    scale = float_of_bits(largest) / np.float32(127.0)
    scales[position] = scale
    return np.float32(1.0) / scale if scale > 0 else np.float32(0.0)


def _fetch(builder, address):
    """Have a row of 64 numbers fetched."""
    bits = 32 if address.type.pointee == f32 else address.type.pointee.width
    for at in range(0, PANEL, LINE * 8 // bits):
        prefetch(builder, builder.gep(address, [i64(at)]))


def _add_rows(builder, sums, row, x_at):
    """Add to each query's sums a row of 64 numbers times the number at its address."""
    numbers = [widened(builder, builder.gep(row, [i64(LANES * b)])) for b in range(PARTS)]
    for query, address in zip(sums, x_at, strict=True):
        x = splat(builder, builder.load(address))
        for number, slot in zip(numbers, query, strict=True):
            builder.store(fma(builder, number, x, builder.load(slot)), slot)


def _write_rows(builder, sums, start, stride):
    """Write each query's 64 sums, rows `stride` apart."""
    for m, query in enumerate(loaded(builder, sums)):
        row = builder.gep(start, [builder.mul(stride, i64(m))])
        for b, part in enumerate(query):
            store(builder, part, builder.gep(row, [i64(b * LANES)]))


def _score(n):
    """Make the scores of 64 keys, a block, for n queries."""

    @instructions(
        types.void, ARRAY, types.intp, types.intp, types.intp, ARRAY, types.intp, types.intp, ARRAY,
        types.intp, ARRAY,
    )  # fmt: skip
    def score(builder, queries, start, stride, size, keys, first, padded, p, p_stride, after):
        sums = cleared(builder, n)
        queries = builder.gep(queries, [start])
        begin = builder.mul(first, padded)
        with cgutils.for_range(builder, size) as loop:
            d = loop.index
            place = builder.add(begin, builder.mul(d, i64(PANEL)))
            if n == 1:
                _fetch(builder, builder.gep(after, [place]))
            places = [builder.add(builder.mul(stride, i64(m)), d) for m in range(n)]
            x_at = [builder.gep(queries, [x_place]) for x_place in places]
            _add_rows(builder, sums, builder.gep(keys, [place]), x_at)
        _write_rows(builder, sums, builder.gep(p, [first]), p_stride)

    return score


def _mix(n):
    """Make the sums of values weighted by p, of n queries, 64 dimensions from `part`."""

    @instructions(
        types.void, ARRAY, types.intp, types.intp, types.intp, ARRAY, types.intp, types.intp, ARRAY,
        ARRAY,
    )  # fmt: skip
    def mix(builder, p, p_stride, first, end, values, part, padded, out, after):
        sums = cleared(builder, n)
        with cgutils.for_range(builder, end, start=first) as loop:
            t = loop.index
            place = builder.add(part, builder.mul(t, padded))
            if n == 1:
                _fetch(builder, builder.gep(after, [place]))
            places = [builder.add(builder.mul(p_stride, i64(m)), t) for m in range(n)]
            x_at = [builder.gep(p, [x_place]) for x_place in places]
            _add_rows(builder, sums, builder.gep(values, [place]), x_at)
        _write_rows(builder, sums, builder.gep(out, [part]), padded)

    return mix


score1, score4 = _score(1), _score(4)
mix1, mix4 = _mix(1), _mix(4)


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
    begin, end = first // BLOCK * BLOCK, (last // BLOCK + 1) * BLOCK
    stride, padded = queries.shape[1], values.shape[1]
    factor = np.float32(1.0 / math.sqrt(size))
    if n == 1 and scaled:
        for t in range(begin, end, LANES):
            fetch16(key_scales, t)
            fetch16(value_scales, t)
    for block in range(begin, end, BLOCK):
        if n == QUERIES:
            score4(
                queries, row * stride + at, stride, size, keys, block, padded, p, p.shape[1], values
            )
        else:
            score1(
                queries, row * stride + at, stride, size, keys, block, padded, p, p.shape[1], values
            )
    for query in range(n):
        stand = position + query
        low = max(0, stand - window + 1) if window else 0
        _softmax(p[query], begin, low, stand, end, factor, key_scales, value_scales, scaled)
    for part in range(0, padded, BLOCK):
        if n == QUERIES:
            mix4(p, p.shape[1], first, last + 1, values, part, padded, mixed, after)
        else:
            mix1(p, p.shape[1], first, last + 1, values, part, padded, mixed, after)
    for query in range(n):
        for d in range(size):
            out[row + query, at + d] = mixed[query, d]


@njit(error_model="numpy")
def _softmax(p, begin, low, high, end, factor, key_scales, value_scales, scaled):
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
