"""Kernels for the numbers between matmuls, compiled by Numba: GELU, dropout and softmax."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES, LINE
from tiedgpt.infer.kernels.simd import ARRAY, constant, i16, i32, instructions, store, vector
from tiedgpt.infer.kernels.vectors import F16
from tiedgpt.infer.kernels.work_stealing import add

CHUNK = 1 << 14
"""Numbers that a thread claims at a time."""
ROWS = 8
"""Rows of logits that a thread claims at a time."""


@instructions(types.void, ARRAY, types.intp, F16)
def _store_bf16(builder, array, offset, a):
    """Write 16 float32 to a bf16 (uint16) array's data, rounded to nearest even; NaN stays."""
    bits, high = builder.bitcast(a, vector(i32)), constant(i32, 16)
    odd = builder.and_(builder.lshr(bits, high), constant(i32, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(i32, 0x7FFF)), odd), high)
    is_nan = builder.fcmp_unordered("uno", a, a)
    rounded = builder.select(is_nan, constant(i32, 0x7FC0), rounded)
    store(builder, builder.trunc(rounded, vector(i16)), builder.gep(array, [offset]))


def write(array, at, a):
    """Write 16 numbers to a float32 or a bf16 (uint16) array."""


@overload(write, inline="always")
def _typed_write(array, at, a):
    if array.dtype == types.uint16:
        return lambda array, at, a: _store_bf16(array, at, a)
    return lambda array, at, a: vec.store(array, at, a)


@simd.jit(inline="always")
def _sigmoid(z):
    """Return 1 / (1 + e^-2u), where u = sqrt(2 / pi) (z + 0.044715 z^3).

    `vec.exp` ends at e^88. The square of e^-u overflows, so that the result reaches 0 as tanh does.
    """
    one, cubic = vec.splat(np.float32(1.0)), vec.splat(np.float32(0.044715))
    y = vec.add(z, vec.multiply(vec.multiply(z, cubic), vec.multiply(z, z)))
    root = vec.exp(vec.shift(y, np.float32(0.0), np.float32(-0.7978845608028654)))
    return vec.divide(one, vec.add(one, vec.multiply(root, root)))


@simd.jit
def gelu(control, z, y):
    """Write z / (1 + e^-2u), which is GELU's approximation by tanh, to y; a multiple of 16."""
    n = z.shape[0]
    start = add(control.counters, 0, CHUNK)
    while start < n:
        for at in range(start, min(n, start + CHUNK), LANES):
            v = vec.load(z, at)
            write(y, at, vec.multiply(v, _sigmoid(v)))
        start = add(control.counters, 0, CHUNK)


@simd.jit
def gelu_gradient(control, z, grad, out):
    """Write grad times GELU'(z) = s + z s (1 - s) 2u', where s = 1 / (1 + e^-2u), to out."""
    n = z.shape[0]
    two_c = vec.splat(np.float32(2 * 0.7978845608028654))
    cubic = vec.splat(np.float32(6 * 0.7978845608028654 * 0.044715))
    start = add(control.counters, 0, CHUNK)
    while start < n:
        for at in range(start, min(n, start + CHUNK), LANES):
            v = vec.load(z, at)
            s = _sigmoid(v)
            slope = vec.add(two_c, vec.multiply(cubic, vec.multiply(v, v)))
            rest = vec.multiply(vec.shift(s, np.float32(1.0), np.float32(-1.0)), slope)
            derivative = vec.add(s, vec.multiply(vec.multiply(v, s), rest))
            write(out, at, vec.multiply(vec.load(grad, at), derivative))
        start = add(control.counters, 0, CHUNK)


@instructions(F16, F16, types.int64, types.int64, types.float32)
def _draw_scales(builder, numbers, seed, threshold, scale):
    """Return for 16 int32 (as F16) `scale`, or 0 with a probability of threshold / 2^32.

    The number is hashed (lowbias32 of Wellons 2018, "Prospecting for hash functions"); the upper
    bits of the seed join before the second multiplication. The comparison reads the upper bits,
    which the third multiplication mixes: without it, elements at a distance of 2^15 + 1 have a
    correlation of 0.02.
    """

    def splat(value):
        return simd.splat(builder, builder.trunc(value, i32))

    def fold(x, shift):
        return builder.xor(x, builder.lshr(x, constant(i32, shift)))

    x = fold(builder.bitcast(numbers, vector(i32)), 16)
    x = fold(builder.mul(x, constant(i32, 0x21F0AAAD)), 15)
    x = builder.xor(x, splat(builder.lshr(seed, simd.i64(32))))
    x = fold(builder.mul(x, constant(i32, 0xD35A2D97)), 15)
    x = builder.mul(x, constant(i32, 0x31848BAB))
    is_kept = builder.icmp_unsigned(">=", x, splat(threshold))
    return builder.select(is_kept, simd.splat(builder, scale), constant(simd.f32, 0.0))


@simd.jit
def dropout(control, x, y, seed, threshold, scale):
    """Write x times `scale`, or times 0 with a probability of threshold / 2^32, to y."""
    n = x.shape[0]
    start = add(control.counters, 0, CHUNK)
    while start < n:
        for at in range(start, min(n, start + CHUNK), LANES):
            scales = _draw_scales(vec.count_from(at + seed), seed, threshold, scale)
            write(y, at, vec.multiply(vec.load(x, at), scales))
        start = add(control.counters, 0, CHUNK)


@simd.jit
def softmax_gradient(control, width, logits, answers, shares, scratch, losses):
    """Replace logits (N, width) by the gradient of their loss, share (softmax - onehot).

    `losses` receives each row's loss times its share. The width is a multiple of 16; `scratch` has
    `width` numbers for each thread.
    """
    n_rows = shares.shape[0]
    buffer = add(control.counters, LINE, 1) * width  # the second counter numbers threads
    start = add(control.counters, 0, ROWS)
    while start < n_rows:
        for row in range(start, min(n_rows, start + ROWS)):
            at, share, answer = row * width, shares[row], answers[row]
            top = vec.load(logits, at)
            for d in range(0, width, LANES):
                v = vec.load(logits, at + d)
                vec.store(scratch, buffer + d, v)
                top = vec.larger(top, v)
            largest, total = vec.largest(top), vec.splat(np.float32(0.0))
            loss = largest - scratch[buffer + answer]
            for d in range(0, width, LANES):
                v = vec.shift(vec.load(scratch, buffer + d), largest, np.float32(1.0))
                e = vec.exp(v)
                vec.store(scratch, buffer + d, e)
                total = vec.add(total, e)
            nan_if_diverged = largest - largest  # `vec.exp` of NaN is a number
            exponentials = vec.total(total) + nan_if_diverged
            losses[row] = np.float32(0.0)
            if share != 0:
                losses[row] = (loss + np.float32(math.log(exponentials))) * share
            scratch[buffer + answer] -= exponentials
            factor = vec.splat(share / exponentials)
            for d in range(0, width, LANES):
                write(logits, at + d, vec.multiply(vec.load(scratch, buffer + d), factor))
        start = add(control.counters, 0, ROWS)
