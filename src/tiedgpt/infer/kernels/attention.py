"""Attention of new positions over the KV cache, whose cost grows with the filled length only.

Keys lie in blocks of 64 positions (C/64, D/H, 64), so that a register holds one dimension of 16
keys, and a block is read from its beginning to its end; values lie by position (C, D/H). Both are
float32, bf16 (as uint16), or int8 with a scale for each position. The two matmuls add up as those
of weights do (`microkernels.py`): 1 or 4 queries at a time.

One query alone waits for memory. So it prefetches while it reads: beside each row of keys, a row of
the values that are read next; beside each row of values, a row of the next head's keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils

from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import BLOCK, LANES, QUERIES
from tiedgpt.infer.kernels.microkernels import (
    PANEL,
    add_products,
    add_scaled,
    load_sums,
    split_panel,
    zero_sums,
)
from tiedgpt.infer.kernels.quantize import convert
from tiedgpt.infer.kernels.simd import (
    ARRAY,
    f32,
    i64,
    instructions,
    jit,
    load_float32,
    prefetch,
    store,
)

NONE = np.float32(-np.inf)


class Span(NamedTuple):
    """The positions whose scores are computed, begin..end - 1, and those that a query sees."""

    begin: Any
    first: Any
    last: Any
    end: Any


@jit
def append(key, value, n, position, head):
    """Write a key and a value (D/H,) at their position of a `HeadCache`."""
    block, column = position // BLOCK, position % BLOCK
    key_inverse = value_inverse = np.float32(1.0)
    if len(head.key_scales):
        key_inverse = _set_scale(key, n, position, head.key_scales)
        value_inverse = _set_scale(value, n, position, head.value_scales)
    keys, values = head.keys[block], head.values[position]
    for d in range(n):
        keys[d, column] = convert(key[d], key_inverse, keys)
    for d in range(n):
        values[d] = convert(value[d], value_inverse, values)


@jit
def _set_scale(x, n, position, scales):
    """Set the scale of x at its position; return the inverse."""
    largest = np.int32(0)
    for d in range(n):  # without the sign, bits are in the order of numbers, and NaN the largest
        largest = max(largest, vec.bits_of_float(x[d]) & np.int32(0x7FFFFFFF))
    scale = vec.float_of_bits(largest) / np.float32(127.0)
    scales[position] = scale
    return np.float32(1.0) / scale if scale > 0 else np.float32(0.0)


class MatrixRows(NamedTuple):
    """The rows of a matrix, from somewhere inside it."""

    data: Any
    stride: Any
    """The numbers from one row to the next."""


@jit(inline="always")
def _rows_at(array, row, column):
    """Return the rows of a two-dimensional array from a row and a column on."""
    return MatrixRows(array[row:, column:], array.shape[1])


def _matmul(n):
    """Make the product of `n` vectors x and `n_rows` rows of 64 numbers of w.

    One vector alone prefetches, beside each row of w, one of `after`, whose rows lie likewise.
    """

    @instructions(types.void, ARRAY, ARRAY, types.intp, ARRAY, ARRAY)
    def matmul(builder, x, w, n_rows, out, after):
        for parts in split_panel(n):
            sums = zero_sums(builder, n, len(parts))
            with cgutils.for_range(builder, n_rows) as loop:
                start = builder.mul(loop.index, w.stride)
                if n == 1:
                    _prefetch_row(builder, builder.gep(after, [start]))
                offsets = [builder.add(start, i64(LANES * block)) for block in parts]
                rows = [load_float32(builder, builder.gep(w.data, [offset])) for offset in offsets]
                offsets = [builder.add(builder.mul(x.stride, i64(m)), loop.index) for m in range(n)]
                numbers = [builder.load(builder.gep(x.data, [offset])) for offset in offsets]
                add_products(builder, sums, rows, numbers, add_scaled)
            for m, vectors in enumerate(load_sums(builder, sums)):
                row = builder.gep(out.data, [builder.mul(out.stride, i64(m))])
                for block, values in zip(parts, vectors, strict=True):
                    store(builder, values, builder.gep(row, [i64(block * LANES)]))

    return matmul


def _prefetch_row(builder, address):
    """Prefetch 64 numbers."""
    bits = 32 if address.type.pointee == f32 else address.type.pointee.width
    for at in range(0, PANEL, 64 * 8 // bits):  # of each cache line the first
        prefetch(builder, builder.gep(address, [i64(at)]))


matmul1, matmul4 = _matmul(1), _matmul(QUERIES)


@jit(inline="always")
def _multiply(n, x, w, n_rows, out, after):
    """Write the product of n vectors x, 1 or 4, and `n_rows` rows of w to `out`."""
    if n == QUERIES:
        matmul4(x, w, n_rows, out, after)
    else:
        matmul1(x, w, n_rows, out, after)


@jit
def attend(queries, head, next_keys, p, mixed, out):
    """Attend from `Queries` over a `HeadCache`, and write the result to the same place of `out`.

    `next_keys` are the keys that are read next. `p` (4, C) and `mixed` (4, D/H) are scratch. A
    query's result is the same whether it is read alone or with others: positions that it does not
    see add zeros.
    """
    n, size, position, window = queries.n, queries.size, queries.position, queries.window
    end, padded = position + n, head.values.shape[1]
    first = max(0, position - window + 1) if window else 0
    begin, stop = first // BLOCK * BLOCK, ((end - 1) // BLOCK + 1) * BLOCK
    if n == 1 and len(head.key_scales):
        for t in range(begin, stop, LANES):
            vec.prefetch(head.key_scales, t)
            vec.prefetch(head.value_scales, t)
    x = _rows_at(queries.rows, queries.first, queries.column)
    for block in range(begin, stop, BLOCK):
        keys = MatrixRows(head.keys[block // BLOCK], PANEL)
        _multiply(n, x, keys, size, _rows_at(p, 0, block), head.values[block:])
    factor = np.float32(1.0 / math.sqrt(size))
    for query in range(n):
        last = position + query
        lowest = max(0, last - window + 1) if window else 0
        _softmax(p[query], Span(begin, lowest, last, stop), factor, head)
    for column in range(0, padded, PANEL):
        after = next_keys[first // BLOCK, column // PANEL :]  # as far from its beginning as values
        values, weights = _rows_at(head.values, first, column), _rows_at(p, 0, first)
        _multiply(n, weights, values, end - first, _rows_at(mixed, 0, column), after)
    for query in range(n):
        row = out[queries.first + query]
        for d in range(size):
            row[queries.column + d] = mixed[query, d]


@jit
def _softmax(p, span, factor, head):
    """Softmax of the scores that a query sees; those of the other positions become 0."""
    is_scaled = len(head.key_scales) > 0
    if is_scaled:
        for t in range(span.begin, span.end, LANES):
            vec.store(p, t, vec.multiply(vec.load(p, t), vec.load(head.key_scales, t)))
    for t in range(span.begin, span.first):
        p[t] = NONE
    for t in range(span.last + 1, span.end):
        p[t] = NONE
    top = vec.splat(NONE)
    for t in range(span.begin, span.end, LANES):
        top = vec.maximum(top, vec.load(p, t))
    largest = vec.largest(top)
    total = vec.splat(np.float32(0.0))
    for t in range(span.begin, span.end, LANES):
        e = vec.exp(vec.shift(vec.load(p, t), largest, factor))
        vec.store(p, t, e)
        total = vec.add(total, e)
    inverse = vec.splat(np.float32(1.0) / vec.total(total))
    for t in range(span.begin, span.end, LANES):
        weight = vec.multiply(vec.load(p, t), inverse)
        if is_scaled:
            weight = vec.multiply(weight, vec.load(head.value_scales, t))
        vec.store(p, t, weight)
