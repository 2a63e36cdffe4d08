"""Kernels for causal attention of short sequences and its gradient, compiled by Numba.

Each thread takes one head of one sequence at a time. It copies the head's Q, K and V as fp32 to its
part of `scratch`, which stays in the core's cache, and computes products in tiles of 8 x 32. Tiles
that the causal mask hides are skipped. Offsets into `scratch` are named by the matrix that begins
there; `k_t` and `v_t` are transposed.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.core import cgutils

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES, LINE
from tiedgpt.infer.kernels.microkernels import add_products, add_scaled, load_sums, zero_sums
from tiedgpt.infer.kernels.simd import ARRAY, f32, i64, instructions
from tiedgpt.infer.kernels.work_stealing import add
from tiedgpt.train.step.kernels.elementwise import write

ROWS, COLUMNS = 8, 32
"""Size of a tile."""
GROUP_ROWS, GROUP_PARTS = (8, 2) if simd.HAS_WIDE_REGISTERS else (4, 1)
"""Rows and vectors of a tile whose sums fit into registers."""
INT = types.intp


@instructions(types.void, ARRAY, INT, INT, INT, INT, INT, INT, INT, INT)
def _multiply_tile(builder, x, a, a_row, a_step, b, b_row, n, out, out_row):
    """Write the product of A (8, n) and B (n, 32) to `out`; offsets and strides are those of x."""
    for first in range(0, ROWS, GROUP_ROWS):
        rows = [i64(row) for row in range(first, first + GROUP_ROWS)]
        starts = [builder.add(a, builder.mul(row, a_row)) for row in rows]
        for column in range(0, COLUMNS, GROUP_PARTS * LANES):
            columns = [i64(column + LANES * number) for number in range(GROUP_PARTS)]
            sums = zero_sums(builder, GROUP_ROWS, GROUP_PARTS)
            with cgutils.for_range(builder, n) as loop:
                b_start = builder.add(b, builder.mul(loop.index, b_row))
                step = builder.mul(loop.index, a_step)
                vectors = [
                    simd.load(builder, builder.gep(x, [builder.add(b_start, column)]), f32)
                    for column in columns
                ]
                offsets = [builder.add(start, step) for start in starts]
                numbers = [builder.load(builder.gep(x, [offset])) for offset in offsets]
                add_products(builder, sums, vectors, numbers, add_scaled)
            for row, values in zip(rows, load_sums(builder, sums), strict=True):
                start = builder.add(out, builder.mul(row, out_row))
                for column, value in zip(columns, values, strict=True):
                    simd.store(builder, value, builder.gep(x, [builder.add(start, column)]))


@simd.jit(inline="always")
def _copy(array, at, stride, n, size, factor, scratch, out):
    """Copy n rows of `size` numbers times a factor to `scratch`, side by side."""
    for i in range(n):
        for d in range(0, size, LANES):
            v = vec.load(array, at + i * stride + d)
            vec.store(scratch, out + i * size + d, vec.shift(v, np.float32(0.0), factor))


@simd.jit(inline="always")
def _transpose(array, at, stride, n, size, scratch, out, buffer):
    """Copy n rows of `size` numbers to `scratch` as columns."""
    _copy(array, at, stride, n, size, np.float32(1.0), scratch, buffer)
    for i in range(n):
        for d in range(size):
            scratch[out + d * n + i] = scratch[buffer + i * size + d]


@simd.jit(inline="always")
def _write_product(scratch, a, a_row, a_step, b, n, size, buffer, array, at, stride):
    """Write the product of A (8, n) and B (n, size) to 8 rows of an array."""
    for d in range(0, size, COLUMNS):
        _multiply_tile(scratch, a, a_row, a_step, b + d, size, n, buffer + d, size)
    for i in range(ROWS):
        for d in range(0, size, LANES):
            write(array, at + i * stride + d, vec.load(scratch, buffer + i * size + d))


@simd.jit(inline="always")
def _softmax(x, at, n_seen, n, normalizers, normalizers_at):
    """Replace the first `n_seen` of n scores by their softmax, and the others by 0.

    `normalizers` receives the largest score and the inverse of the sum of exponentials.
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
    normalizers[normalizers_at], normalizers[normalizers_at + 1] = largest, inverse
    for t in range(0, n, LANES):
        vec.store(x, at + t, vec.multiply(vec.load(x, at + t), vec.splat(inverse)))


@simd.jit(inline="always")
def _recompute_softmax(x, at, n_seen, n, normalizers, normalizers_at):
    """Do the same as `_softmax` with the `normalizers` that it wrote."""
    largest, inverse = normalizers[normalizers_at], vec.splat(normalizers[normalizers_at + 1])
    for t in range(n_seen, n):
        x[at + t] = np.float32(-np.inf)
    for t in range(0, n, LANES):
        e = vec.exp(vec.shift(vec.load(x, at + t), largest, np.float32(1.0)))
        vec.store(x, at + t, vec.multiply(e, inverse))


@simd.jit(inline="always")
def _softmax_gradient(x, p, gradient, n):
    """Replace the gradient of n probabilities p by the gradient of their scores; both are in x."""
    products = vec.splat(np.float32(0.0))
    for t in range(0, n, LANES):
        product = vec.multiply(vec.load(x, p + t), vec.load(x, gradient + t))
        products = vec.add(products, product)
    total = vec.total(products)
    for t in range(0, n, LANES):
        difference = vec.shift(vec.load(x, gradient + t), total, np.float32(1.0))
        vec.store(x, gradient + t, vec.multiply(vec.load(x, p + t), difference))


@simd.jit
def attention(control, n_sequences, n_positions, n_head, size, qkv, normalizers, scratch, y):
    """Write attention of qkv (B, T, 3, H, D/H) to y (B, T, H, D/H).

    `normalizers` (B, H, T, 2) receives what `_softmax` writes; `scratch` has T (8 + 4 D/H) numbers
    for each thread.
    """
    n, width, one = n_positions, n_head * size, np.float32(1.0)
    stride, scale = 3 * width, np.float32(1.0 / math.sqrt(size))
    p = add(control.counters, LINE, 1) * n * (ROWS + 4 * size)  # the second counter numbers threads
    q, k_t = p + n * ROWS, p + n * (ROWS + size)
    v, buffer = k_t + n * size, k_t + 2 * n * size
    item = add(control.counters, 0, 1)
    while item < n_sequences * n_head:
        row, head = item // n_head * n, item % n_head * size
        start = row * stride + head
        _copy(qkv, start, stride, n, size, scale, scratch, q)
        _transpose(qkv, start + width, stride, n, size, scratch, k_t, buffer)
        _copy(qkv, start + 2 * width, stride, n, size, one, scratch, v)
        for i in range(0, n, ROWS):
            n_columns = i // COLUMNS * COLUMNS + COLUMNS
            for j in range(0, n_columns, COLUMNS):
                _multiply_tile(scratch, q + i * size, size, 1, k_t + j, n, size, p + j, n)
            for r in range(ROWS):
                at = 2 * (item * n + i + r)
                _softmax(scratch, p + r * n, i + r + 1, n_columns, normalizers, at)
            at = (row + i) * width + head
            _write_product(scratch, p, n, 1, v, i + ROWS, size, buffer, y, at, width)
        item = add(control.counters, 0, 1)


@simd.jit
def attention_gradient(
    control, n_sequences, n_positions, n_head, size, qkv, normalizers, grad, scratch, out
):
    """Write the gradient of qkv to `out`; `scratch` has T (2 T + 6 D/H) numbers for each thread."""
    n, width, one = n_positions, n_head * size, np.float32(1.0)
    stride, scale = 3 * width, np.float32(1.0 / math.sqrt(size))
    p = add(control.counters, LINE, 1) * n * (2 * n + 6 * size)
    ds, q = p + n * n, p + 2 * n * n
    k_t, v_t, dy = q + n * size, q + 2 * n * size, q + 3 * n * size
    k, buffer = q + 4 * n * size, q + 5 * n * size
    item = add(control.counters, 0, 1)
    while item < n_sequences * n_head:
        row, head = item // n_head * n, item % n_head * size
        start = row * stride + head
        _copy(qkv, start, stride, n, size, scale, scratch, q)
        _transpose(qkv, start + width, stride, n, size, scratch, k_t, buffer)
        _copy(qkv, start + width, stride, n, size, scale, scratch, k)
        _transpose(qkv, start + 2 * width, stride, n, size, scratch, v_t, buffer)
        _copy(grad, row * width + head, width, n, size, one, scratch, dy)
        for i in range(0, n, ROWS):
            n_columns, q_i, dy_i = i // COLUMNS * COLUMNS + COLUMNS, q + i * size, dy + i * size
            for j in range(0, n_columns, COLUMNS):
                at = i * n + j
                _multiply_tile(scratch, q_i, size, 1, k_t + j, n, size, p + at, n)
                _multiply_tile(scratch, dy_i, size, 1, v_t + j, n, size, ds + at, n)
            for r in range(i, i + ROWS):
                at = 2 * (item * n + r)
                _recompute_softmax(scratch, p + r * n, r + 1, n_columns, normalizers, at)
                _softmax_gradient(scratch, p + r * n, ds + r * n, n_columns)
            at, ds_i = start + i * stride, ds + i * n
            _write_product(scratch, ds_i, n, 1, k, i + ROWS, size, buffer, out, at, stride)
        for j in range(0, n, ROWS):  # rows of the gradients of K and V: columns j of ds and p
            at, diagonal = start + j * stride + width, j * n + j
            ds_j, p_j, q_j, dy_j = ds + diagonal, p + diagonal, q + j * size, dy + j * size
            _write_product(scratch, ds_j, 1, n, q_j, n - j, size, buffer, out, at, stride)
            at += width
            _write_product(scratch, p_j, 1, n, dy_j, n - j, size, buffer, out, at, stride)
        item = add(control.counters, 0, 1)
