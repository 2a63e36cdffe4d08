"""Activations in the dtype that a GEMM's weights ask for.

float32 for fp32, bf16 (as uint16) for bf16, and int8 for int8 and int4, with a scale for each 64
numbers and their sum for each 32.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES, Vectors
from tiedgpt.infer.kernels.simd import ARRAY, f32, i8, i32, i64, instructions, jit, vector

GROUP = 64
"""The int8 activations that share a scale."""


@jit(inline="always")
def to_bf16(x):
    """Return the bits of float32 rounded to bf16, to nearest even."""
    bits = vec.bits_of_float(x)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> 16)


def convert(x: Any, inverse: Any, array: Any) -> Any:
    """Return a float32 in the dtype of an array; int8 is x times the inverse of its scale."""


@overload(convert, inline="always")
def _convert(x, inverse, array):
    if array.dtype == types.int8:
        return lambda x, inverse, array: np.int8(np.int32(vec.nearest(x * inverse)))
    if array.dtype == types.uint16:
        return lambda x, inverse, array: to_bf16(x)
    return lambda x, inverse, array: x


@jit(inline="always")
def row_of(vectors, m):
    """Return one of the vectors."""
    return Vectors(vectors.values[m], vectors.scales[m], vectors.sums[m])


@instructions(types.void, ARRAY, types.intp, ARRAY, types.intp)
def quantize64(builder, x, start, out, at):
    """Write 64 numbers of x, from `start`, as int8 to a row of `Vectors`, from `at`.

    Their scale is the largest of them over 127.
    """
    offsets = [i64(p) for p in range(0, GROUP, LANES)]
    parts = [simd.load(builder, builder.gep(x, [builder.add(start, p)]), f32) for p in offsets]
    tops = [simd.call(builder, "llvm.fabs.v16f32", vector(f32), [numbers]) for numbers in parts]
    join = partial(simd.larger, builder)
    top = simd.reduce_lanes(builder, reduce(join, tops), join)
    scale = builder.fmul(top, f32(float(np.float32(1 / 127))))
    is_positive = builder.fcmp_ordered(">", scale, f32(0.0))
    inverse = builder.select(is_positive, builder.fdiv(f32(1.0), scale), f32(0.0))
    group = builder.lshr(at, i64(6))
    builder.store(scale, builder.gep(out.scales, [group]))
    integers = []
    for offset, numbers in zip(offsets, parts, strict=True):
        scaled = builder.fmul(numbers, simd.splat(builder, inverse))
        rounded = simd.call(builder, "llvm.rint.v16f32", vector(f32), [scaled])
        integers.append(builder.fptosi(rounded, vector(i32)))
        target = builder.gep(out.values, [builder.add(at, offset)])
        simd.store(builder, builder.trunc(integers[-1], vector(i8)), target)
    for half in range(2):
        both = builder.add(integers[2 * half], integers[2 * half + 1])
        address = builder.add(builder.shl(group, i64(1)), i64(half))
        builder.store(
            simd.reduce_lanes(builder, both, builder.add), builder.gep(out.sums, [address])
        )


def quantize(x: Any, at: int, n: int, out: Vectors) -> None:
    """Write the first n of x to a row of `Vectors`, from `at`, in its dtype."""


@overload(quantize, inline="always")
def _quantize(x, at, n, out):
    values, _, _ = out.types
    if values.dtype == types.int8:

        def to_int8(x, at, n, out):
            for start in range(0, n, GROUP):
                quantize64(x, start, out, at + start)

        return to_int8

    def to_float(x, at, n, out):
        values = out.values[at : at + n]
        for i in range(n):
            values[i] = convert(x[i], np.float32(1.0), values)

    return to_float
