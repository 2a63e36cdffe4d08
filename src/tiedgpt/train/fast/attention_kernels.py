"""Kernels for causal attention of short sequences and its gradient, compiled by Numba.

One thread computes a head of a sequence. It copies Q, K and V to scratch in fp32, where a head lies
in the core's cache, and multiplies tiles of 8 x 32 numbers; tiles of hidden positions are skipped.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.core import cgutils

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES, LINE
from tiedgpt.infer.kernels.microkernels import add_products, add_scaled, load_sums, zero_sums
from tiedgpt.infer.kernels.simd import ARRAY, f32, i64, instructions
from tiedgpt.infer.kernels.work_stealing import add
from tiedgpt.train.fast.kernels import write

ROWS, COLUMNS = 8, 32
"""The numbers of a tile."""
GROUP_ROWS, GROUP_PARTS = (8, 2) if simd.HAS_WIDE_REGISTERS else (4, 1)
"""Rows and vectors of a tile whose sums fit into registers."""
INT = types.intp


@instructions(types.void, ARRAY, INT, INT, INT, ARRAY, INT, INT, INT, ARRAY, INT, INT)
def _tile(builder, a, a_at, a_row, a_step, b, b_at, b_row, n, out, out_at, out_row):
    """Write the products (8, 32) of A (8, n) and B (n, 32): of parts of arrays, with strides."""
    for first in range(0, ROWS, GROUP_ROWS):
        rows = [i64(row) for row in range(first, first + GROUP_ROWS)]
        starts = [builder.add(a_at, builder.mul(row, a_row)) for row in rows]
        for column in range(0, COLUMNS, GROUP_PARTS * LANES):
            columns = [i64(column + LANES * number) for number in range(GROUP_PARTS)]
            sums = zero_sums(builder, GROUP_ROWS, GROUP_PARTS)
            with cgutils.for_range(builder, n) as loop:
                b_start = builder.add(b_at, builder.mul(loop.index, b_row))
                step = builder.mul(loop.index, a_step)
                vectors = [
                    simd.load(builder, builder.gep(b, [builder.add(b_start, column)]), f32)
                    for column in columns
                ]
                offsets = [builder.add(start, step) for start in starts]
                numbers = [builder.load(builder.gep(a, [offset])) for offset in offsets]
                add_products(builder, sums, vectors, numbers, add_scaled)
            for row, values in zip(rows, load_sums(builder, sums), strict=True):
                start = builder.add(out_at, builder.mul(row, out_row))
                for column, value in zip(columns, values, strict=True):
                    simd.store(builder, value, builder.gep(out, [builder.add(start, column)]))


@njit(inline="always", error_model="numpy")
def _copy(array, at, row, n, size, factor, out, out_at):
    """Copy n rows of `size` numbers times a factor to fp32 rows side by side."""
    for i in range(n):
        for d in range(0, size, LANES):
            v = vec.load(array, at + i * row + d)
            vec.store(out, out_at + i * size + d, vec.shift(v, np.float32(0.0), factor))


@njit(inline="always", error_model="numpy")
def _transpose(x, at, n, size, out, out_at):
    """Write n rows of `size` numbers as columns."""
    for i in range(n):
        for d in range(size):
            out[out_at + d * n + i] = x[at + i * size + d]


@njit(inline="always", error_model="numpy")
def _write_rows(x, at, size, array, array_at, row):
    """Write 8 rows of scratch to rows of an array."""
    for i in range(ROWS):
        for d in range(0, size, LANES):
            write(array, array_at + i * row + d, vec.load(x, at + i * size + d))


@njit(inline="always", error_model="numpy")
def _softmax(x, at, n_seen, n, moments, moments_at):
    """Softmax of the first `n_seen` of n scores; the others become 0.

    `moments` receives the largest score and the inverse of the sum.
    """
    for t in range(n_seen, n):
        x[at + t] = np.float32(-np.inf)
    top, total = vec.load(x, at), vec.splat(np.float32(0.0))
    for t in range(LANES, n, LANES):
        top = vec.larger(top, vec.load(x, at + t))
    largest = vec.largest(top)
    for t in range(0, n, LANES):
        e = vec.exp(vec.shift(vec.load(x, at + t), largest, np.float32(1.0)))
        vec.store(x, at + t, e)
        total = vec.add(total, e)
    nan_if_diverged = largest - largest  # `vec.exp` of NaN is a number
    inverse = np.float32(1.0) / vec.total(total) + nan_if_diverged
    moments[moments_at], moments[moments_at + 1] = largest, inverse
    for t in range(0, n, LANES):
        vec.store(x, at + t, vec.multiply(vec.load(x, at + t), vec.splat(inverse)))


@njit(inline="always", error_model="numpy")
def _softmax_again(x, at, n_seen, n, moments, moments_at):
    """Softmax of scores whose `moments` are known."""
    largest, inverse = moments[moments_at], vec.splat(moments[moments_at + 1])
    for t in range(n_seen, n):
        x[at + t] = np.float32(-np.inf)
    for t in range(0, n, LANES):
        e = vec.exp(vec.shift(vec.load(x, at + t), largest, np.float32(1.0)))
        vec.store(x, at + t, vec.multiply(e, inverse))


@njit(inline="always", error_model="numpy")
def _softmax_gradient(p, p_at, x, at, n):
    """Turn the gradient x of n numbers of softmax p into that of their scores."""
    products = vec.splat(np.float32(0.0))
    for t in range(0, n, LANES):
        products = vec.add(products, vec.multiply(vec.load(p, p_at + t), vec.load(x, at + t)))
    total = vec.total(products)
    for t in range(0, n, LANES):
        difference = vec.shift(vec.load(x, at + t), total, np.float32(1.0))
        vec.store(x, at + t, vec.multiply(vec.load(p, p_at + t), difference))


@njit(error_model="numpy")
def attention(control, n_sequences, n_positions, n_head, size, qkv, moments, scratch, y):
    """Write attention of qkv (B, T, 3, H, D/H) to y (B, T, H, D/H).

    `moments` (B, H, T, 2) receives what `_softmax` says; scratch has T (8 + 4 D/H) numbers for each
    thread.
    """
    n, width, one = n_positions, n_head * size, np.float32(1.0)
    scale = np.float32(1.0 / math.sqrt(size))
    p = add(control.counters, LINE, 1) * n * (ROWS + 4 * size)
    q, k = p + n * ROWS, p + n * (ROWS + size)
    v, spare = k + n * size, k + 2 * n * size
    item = add(control.counters, 0, 1)
    while item < n_sequences * n_head:
        row, head = item // n_head * n, item % n_head * size
        start = row * 3 * width + head
        _copy(qkv, start + width, 3 * width, n, size, one, scratch, spare)
        _transpose(scratch, spare, n, size, scratch, k)
        _copy(qkv, start, 3 * width, n, size, scale, scratch, q)
        _copy(qkv, start + 2 * width, 3 * width, n, size, one, scratch, v)
        for i in range(0, n, ROWS):
            seen = i // COLUMNS * COLUMNS + COLUMNS
            for j in range(0, seen, COLUMNS):
                _tile(scratch, q + i * size, size, 1, scratch, k + j, n, size, scratch, p + j, n)
            for r in range(ROWS):
                at = 2 * (item * n + i + r)
                _softmax(scratch, p + r * n, i + r + 1, seen, moments, at)
            for d in range(0, size, COLUMNS):
                o = spare + d
                _tile(scratch, p, n, 1, scratch, v + d, size, i + ROWS, scratch, o, size)
            _write_rows(scratch, spare, size, y, (row + i) * width + head, width)
        item = add(control.counters, 0, 1)


@njit(error_model="numpy")
def attention_gradient(
    control, n_sequences, n_positions, n_head, size, qkv, moments, grad, scratch, out
):
    """Write the gradient of qkv to `out`; scratch has T (2 T + 6 D/H) numbers for each thread."""
    n, width, one = n_positions, n_head * size, np.float32(1.0)
    scale = np.float32(1.0 / math.sqrt(size))
    p = add(control.counters, LINE, 1) * n * (2 * n + 6 * size)
    ds, q = p + n * n, p + 2 * n * n
    k, v, g = q + n * size, q + 2 * n * size, q + 3 * n * size
    rows_of_k, spare = q + 4 * n * size, q + 5 * n * size
    item = add(control.counters, 0, 1)
    while item < n_sequences * n_head:
        row, head = item // n_head * n, item % n_head * size
        start = row * 3 * width + head
        _copy(qkv, start, 3 * width, n, size, scale, scratch, q)
        _copy(qkv, start + width, 3 * width, n, size, one, scratch, spare)
        _transpose(scratch, spare, n, size, scratch, k)
        _copy(qkv, start + width, 3 * width, n, size, scale, scratch, rows_of_k)
        _copy(qkv, start + 2 * width, 3 * width, n, size, one, scratch, spare)
        _transpose(scratch, spare, n, size, scratch, v)
        _copy(grad, row * width + head, width, n, size, one, scratch, g)
        for i in range(0, n, ROWS):
            seen, ahead = i // COLUMNS * COLUMNS + COLUMNS, i * size
            for j in range(0, seen, COLUMNS):
                p_at, ds_at = p + i * n + j, ds + i * n + j
                _tile(scratch, q + ahead, size, 1, scratch, k + j, n, size, scratch, p_at, n)
                _tile(scratch, g + ahead, size, 1, scratch, v + j, n, size, scratch, ds_at, n)
            for r in range(i, i + ROWS):
                _softmax_again(scratch, p + r * n, r + 1, seen, moments, 2 * (item * n + r))
                _softmax_gradient(scratch, p + r * n, scratch, ds + r * n, seen)
            for d in range(0, size, COLUMNS):
                b, o = rows_of_k + d, spare + d
                _tile(scratch, ds + i * n, n, 1, scratch, b, size, i + ROWS, scratch, o, size)
            _write_rows(scratch, spare, size, out, start + i * 3 * width, 3 * width)
        for j in range(0, n, ROWS):
            at, corner, rest = start + j * 3 * width, j * n + j, n - j
            for d in range(0, size, COLUMNS):
                b, o = q + j * size + d, spare + d
                _tile(scratch, ds + corner, 1, n, scratch, b, size, rest, scratch, o, size)
            _write_rows(scratch, spare, size, out, at + width, 3 * width)
            for d in range(0, size, COLUMNS):
                b, o = g + j * size + d, spare + d
                _tile(scratch, p + corner, 1, n, scratch, b, size, rest, scratch, o, size)
            _write_rows(scratch, spare, size, out, at + 2 * width, 3 * width)
        item = add(control.counters, 0, 1)
