"""What happens to vectors between products: norms, activations, and the form products read.

Activations are kept in the form that a product's weights ask for: float32 for fp32, bf16 (as
uint16) for bf16, and int8 for int8 and int4, with a scale for each 64 numbers and their sum for
each 32.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from tiedgpt.infer.kernels.simd import (
    LANES,
    call,
    f32,
    folded,
    i8,
    i32,
    larger,
    load,
    pointer,
    splat,
    store,
    vector,
)  # fmt: skip
from tiedgpt.infer.kernels.vectors import (
    add16,
    bits_of_float,
    filled16,
    load16,
    nearest,
    power_of_two,
    scale16,
    total16,
)  # fmt: skip

GELU_NEW, GELU, RELU, SILU = range(4)
ACTIVATIONS = {"gelu_new": GELU_NEW, "gelu": GELU, "relu": RELU, "silu": SILU}
LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
GROUP = 64
"""Activations that share a scale, where they are bytes."""
FAST = {"contract", "reassoc", "nsz", "arcp"}


@njit(inline="always", fastmath={"contract"}, error_model="numpy")
def exp(x):
    """Return e^x in float32, within 2 units in the last place (Cephes' expf), without a branch."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = nearest(x * LOG2E)
    r = x - n * LN2_HIGH - n * LN2_LOW
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * power_of_two(n)


@njit(inline="always", error_model="numpy")
def to_bf16(x):
    """Return the bits of float32 rounded to bf16, to nearest even."""
    bits = bits_of_float(x)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> 16)


@njit(fastmath=FAST, error_model="numpy")
def activate(x, n, kind):
    """Apply an activation to the first n of x, in place."""
    one, half = np.float32(1.0), np.float32(0.5)
    if kind == GELU_NEW:
        a, b = np.float32(-2 * 0.7978845608028654), np.float32(0.044715)
        for i in range(n):
            v = x[i]
            x[i] = v / (one + exp(a * (v + b * v * v * v)))
    elif kind == GELU:
        for i in range(n):
            x[i] = half * x[i] * (one + np.float32(math.erf(x[i] * np.float32(0.7071067811865476))))
    elif kind == RELU:
        for i in range(n):
            x[i] = max(x[i], np.float32(0.0))
    else:
        for i in range(n):
            x[i] = x[i] / (one + exp(-x[i]))


@njit(error_model="numpy")
def normalise(x, width, weight, bias, epsilon, out):
    """LayerNorm of the first `width` of x into `out`, zeros behind, to the next multiple of 16.

    x has zeros there, too. Sums are over 16 lanes, then across them: always in the same order.
    """
    total = filled16(np.float32(0.0))
    for at in range(0, width, LANES):
        total = add16(total, load16(x, at))
    mean = total16(total) / np.float32(width)
    for i in range(width):
        out[i] = x[i] - mean
    for i in range(width, -(-width // LANES) * LANES):
        out[i] = np.float32(0.0)
    squares = filled16(np.float32(0.0))
    for at in range(0, width, LANES):
        d = load16(out, at)
        squares = add16(squares, scale16(d, d))
    scale = np.float32(1.0 / math.sqrt(total16(squares) / np.float32(width) + epsilon))
    for i in range(width):
        out[i] = out[i] * scale * weight[i] + bias[i]


@intrinsic
def quantize64(typing, x, at, out, scales, sums):
    """Write 64 numbers of x, from `at`, as int8 to the same place of `out`.

    Their scale, the largest of them over 127, and the sums of both halves stand by their group.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at, out, scales, sums = arguments
        kinds, kind = signature.args, at.type
        parts = [
            load(builder, pointer(context, builder, kinds[0], x, builder.add(at, kind(p))), f32)
            for p in range(0, GROUP, LANES)
        ]
        tops = [call(builder, "llvm.fabs.v16f32", vector(f32), [part]) for part in parts]
        top = folded(builder, reduce(partial(larger, builder), tops), partial(larger, builder))
        scale = builder.fmul(top, f32(float(np.float32(1 / 127))))
        some = builder.fcmp_ordered(">", scale, f32(0.0))
        inverse = builder.select(some, builder.fdiv(f32(1.0), scale), f32(0.0))
        group = builder.lshr(at, kind(6))
        builder.store(scale, pointer(context, builder, kinds[3], scales, group))
        whole = []
        for number, part in enumerate(parts):
            scaled = builder.fmul(part, splat(builder, inverse))
            rounded = call(builder, "llvm.rint.v16f32", vector(f32), [scaled])
            whole.append(builder.fptosi(rounded, vector(i32)))
            place = builder.add(at, kind(number * LANES))
            small = builder.trunc(whole[-1], vector(i8))
            store(builder, small, pointer(context, builder, kinds[2], out, place))
        for half in range(2):
            both = builder.add(whole[2 * half], whole[2 * half + 1])
            total = folded(builder, both, builder.add)
            place = builder.add(builder.shl(group, kind(1)), kind(half))
            builder.store(total, pointer(context, builder, kinds[4], sums, place))
        return context.get_dummy_value()

    return types.void(x, types.intp, out, scales, sums), emit


def prepare(x: Any, n: int, out: Any, scales: Any, sums: Any) -> None:
    """Write the first n of x in the form of `out`: float32, bf16 or int8."""


@overload(prepare, inline="always")
def _prepare(x, n, out, scales, sums):
    if out.dtype == types.int8:

        def to_int8(x, n, out, scales, sums):
            for at in range(0, n, GROUP):
                quantize64(x, at, out, scales, sums)

        return to_int8
    if out.dtype == types.uint16:

        def rounded(x, n, out, scales, sums):
            for i in range(n):
                out[i] = to_bf16(x[i])

        return rounded

    def copied(x, n, out, scales, sums):
        for i in range(n):
            out[i] = x[i]

    return copied
