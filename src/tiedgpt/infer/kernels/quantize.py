"""Activations in the dtype that a matmul's weights ask for.

float32 for fp32, bf16 (as uint16) for bf16, and int8 for int8 and int4, with a scale for each 64
numbers and their sum for each 32.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.simd import (
    ARRAY,
    call,
    f32,
    folded,
    i8,
    i32,
    i64,
    instructions,
    larger,
    load,
    splat,
    store,
    vector,
)  # fmt: skip
from tiedgpt.infer.kernels.vectors import bits_of_float, nearest

GROUP = 64
"""Activations that share a scale, where they are bytes."""


@njit(inline="always", error_model="numpy")
def to_bf16(x):
    """Return the bits of float32 rounded to bf16, to nearest even."""
    bits = bits_of_float(x)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> 16)


def convert(x: Any, inverse: Any, array: Any) -> Any:
    """Return a float32 in the dtype of an array; int8 is x times the inverse of its scale."""


@overload(convert, inline="always")
def _convert(x, inverse, array):
    if array.dtype == types.int8:
        return lambda x, inverse, array: np.int8(np.int32(nearest(x * inverse)))
    if array.dtype == types.uint16:
        return lambda x, inverse, array: to_bf16(x)
    return lambda x, inverse, array: x


@instructions(types.void, ARRAY, types.intp, ARRAY, ARRAY, ARRAY)
def quantize64(builder, x, at, out, scales, sums):
    """Write 64 numbers of x, from `at`, as int8 to the same place of `out`.

    Their scale, the largest of them over 127, and the sums of both halves stand by their group.
    """
    places = [builder.add(at, i64(p)) for p in range(0, GROUP, LANES)]
    parts = [load(builder, builder.gep(x, [place]), f32) for place in places]
    tops = [call(builder, "llvm.fabs.v16f32", vector(f32), [part]) for part in parts]
    top = folded(builder, reduce(partial(larger, builder), tops), partial(larger, builder))
    scale = builder.fmul(top, f32(float(np.float32(1 / 127))))
    some = builder.fcmp_ordered(">", scale, f32(0.0))
    inverse = builder.select(some, builder.fdiv(f32(1.0), scale), f32(0.0))
    group = builder.lshr(at, i64(6))
    builder.store(scale, builder.gep(scales, [group]))
    whole = []
    for place, part in zip(places, parts, strict=True):
        scaled = builder.fmul(part, splat(builder, inverse))
        rounded = call(builder, "llvm.rint.v16f32", vector(f32), [scaled])
        whole.append(builder.fptosi(rounded, vector(i32)))
        store(builder, builder.trunc(whole[-1], vector(i8)), builder.gep(out, [place]))
    for half in range(2):
        both = builder.add(whole[2 * half], whole[2 * half + 1])
        place = builder.add(builder.shl(group, i64(1)), i64(half))
        builder.store(folded(builder, both, builder.add), builder.gep(sums, [place]))


def quantize(x: Any, n: int, out: Any, scales: Any, sums: Any) -> None:
    """Write the first n of x in the dtype of `out`: float32, bf16 or int8."""


@overload(quantize, inline="always")
def _quantize(x, n, out, scales, sums):
    if out.dtype == types.int8:

        def to_int8(x, n, out, scales, sums):
            for at in range(0, n, GROUP):
                quantize64(x, at, out, scales, sums)

        return to_int8

    def converted(x, n, out, scales, sums):
        for i in range(n):
            out[i] = convert(x[i], np.float32(1.0), out)

    return converted
