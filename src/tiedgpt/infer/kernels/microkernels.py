"""GEMM's microkernels: 64 rows of weights times 1 to 6 vectors, for each precision of weights.

Weights lie in panels of 64 rows (`weights/packed_panels.py`): at each step along a row the 64 rows'
next numbers lie side by side, so that each lane of a register adds up its own row and nothing is
summed across lanes. A row's sum is thus the same for any number of vectors and of threads. Keys and
values of the cache lie in the same way, and attention's two matmuls are made alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import overload

from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.quantize import GROUP
from tiedgpt.infer.kernels.simd import (
    ARRAY,
    constant,
    dot8,
    dot16,
    f32,
    fma,
    i8,
    i16,
    i32,
    i64,
    instructions,
    load,
    splat,
    store,
    vector,
)  # fmt: skip
from tiedgpt.infer.kernels.vectors import float_of_bits

PANEL = 64
PARTS = PANEL // LANES
GROUP_INT4 = 32
"""4-bit weights that share a scale."""


def _microkernel(n: int) -> Any:
    """Make the matmul of a panel with `n` vectors."""

    @instructions(
        types.void, ARRAY, ARRAY, types.intp, ARRAY, ARRAY, ARRAY, types.intp, types.intp, ARRAY
    )
    def microkernel(builder, w, s, panel, x, x_scales, x_sums, first, width, out):
        x = builder.gep(x, [builder.mul(first, width)])
        at = {"w": w, "s": s, "x": x, "xs": x_scales, "xsum": x_sums}
        sums = PRECISIONS[_precision(w, s)](builder, at, panel, first, width, n)
        for m, row in enumerate(sums):
            for part, values in enumerate(row):
                store(builder, values, builder.gep(out, [i64(m * PANEL + part * LANES)]))

    return microkernel


def _precision(weights: Any, scales: Any) -> str:
    """Return the precision of weights by the LLVM types of a packed matrix's arrays."""
    if weights.type.pointee == f32:
        return "fp32"
    if weights.type.pointee == i16:
        return "bf16"
    return "int4" if scales.type.pointee == i16 else "int8"


def _variables(builder: Any, n: int, kind: Any) -> list[list[Any]]:
    return [[cgutils.alloca_once(builder, kind) for _ in range(PARTS)] for _ in range(n)]


def cleared(builder: Any, n: int) -> list[list[Any]]:
    """Return places for the sums of n vectors with 4 x 16 rows, set to 0."""
    sums = _variables(builder, n, vector(f32))
    for row in sums:
        for slot in row:
            builder.store(constant(f32, 0.0), slot)
    return sums


def loaded(builder: Any, slots: list[list[Any]]) -> list[list[Any]]:
    """Return what stands in those places."""
    return [[builder.load(slot) for slot in row] for row in slots]


def _fp32(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """float32 weights (P, K, 64) and vectors (n, K)."""
    sums = cleared(builder, n)
    base = builder.gep(at["w"], [builder.mul(panel, builder.mul(width, width.type(PANEL)))])
    with cgutils.for_range(builder, width) as loop:
        k = loop.index
        row = builder.gep(base, [builder.mul(k, k.type(PANEL))])
        w = [load(builder, builder.gep(row, [k.type(LANES * p)]), f32) for p in range(PARTS)]
        for m in range(n):
            place = builder.add(builder.mul(width, k.type(m)), k)
            x = splat(builder, builder.load(builder.gep(at["x"], [place])))
            for part in range(PARTS):
                slot = sums[m][part]
                builder.store(fma(builder, w[part], x, builder.load(slot)), slot)
    return loaded(builder, sums)


def _bf16(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """bf16 weights (P, K/2, 64, 2) and vectors (n, K), all as uint16."""
    sums = cleared(builder, n)
    half = builder.lshr(width, width.type(1))
    base = builder.gep(at["w"], [builder.mul(panel, builder.mul(width, width.type(PANEL)))])
    words = builder.bitcast(at["x"], i32.as_pointer())
    with cgutils.for_range(builder, half) as loop:
        k = loop.index
        row = builder.gep(base, [builder.mul(k, k.type(2 * PANEL))])
        w = [load(builder, builder.gep(row, [k.type(2 * LANES * p)]), i32) for p in range(PARTS)]
        for m in range(n):
            place = builder.add(builder.mul(half, k.type(m)), k)
            x = builder.load(builder.gep(words, [place]), align=2)
            for part in range(PARTS):
                slot = sums[m][part]
                builder.store(dot16(builder, builder.load(slot), w[part], x), slot)
    return loaded(builder, sums)


def _int8(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """int8 weights + 128 (P, K/4, 64, 4), int8 vectors (n, K) with a scale for each 64."""
    sums, whole = cleared(builder, n), _variables(builder, n, vector(i32))
    kind = width.type
    groups = builder.lshr(width, kind(6))
    base = builder.gep(at["w"], [builder.mul(panel, builder.mul(width, kind(PANEL)))])
    words = builder.bitcast(at["x"], i32.as_pointer())
    quarter = builder.lshr(width, kind(2))
    with cgutils.for_range(builder, groups) as outer:
        g = outer.index
        for m in range(n):
            two = builder.mul(
                builder.add(builder.mul(builder.add(first, kind(m)), groups), g), kind(2)
            )
            a = builder.load(builder.gep(at["xsum"], [two]))
            b = builder.load(builder.gep(at["xsum"], [builder.add(two, kind(1))]))
            begin = splat(builder, builder.mul(builder.add(a, b), i32(-128)))
            for part in range(PARTS):
                builder.store(begin, whole[m][part])
        with cgutils.for_range(builder, kind(GROUP // 4)) as inner:
            k = builder.add(builder.mul(g, kind(GROUP // 4)), inner.index)
            row = builder.gep(base, [builder.mul(k, kind(4 * PANEL))])
            w = [
                load(builder, builder.gep(row, [kind(4 * LANES * p)]), i8, 64) for p in range(PARTS)
            ]
            for m in range(n):
                place = builder.add(builder.mul(quarter, kind(m)), k)
                x = builder.load(builder.gep(words, [place]), align=1)
                for part in range(PARTS):
                    slot = whole[m][part]
                    builder.store(dot8(builder, builder.load(slot), w[part], x), slot)
        for m in range(n):
            place = builder.add(builder.mul(builder.add(first, kind(m)), groups), g)
            scale = splat(builder, builder.load(builder.gep(at["xs"], [place])))
            for part in range(PARTS):
                product = builder.sitofp(builder.load(whole[m][part]), vector(f32))
                slot = sums[m][part]
                builder.store(fma(builder, product, scale, builder.load(slot)), slot)
    return loaded(builder, sums)


def _int4(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """4-bit weights + 8 (P, K/8, 64, 4), with a bf16 scale for each 32; vectors as for int8."""
    sums, whole = cleared(builder, n), _variables(builder, n, vector(i32))
    kind = width.type
    groups = builder.lshr(width, kind(5))
    base = builder.gep(at["w"], [builder.mul(panel, builder.mul(width, kind(PANEL // 2)))])
    scales = builder.gep(at["s"], [builder.mul(panel, builder.mul(groups, kind(PANEL)))])
    words = builder.bitcast(at["x"], i32.as_pointer())
    quarter = builder.lshr(width, kind(2))
    low = constant(i8, 15, 64)
    with cgutils.for_range(builder, groups) as outer:
        g = outer.index
        for m in range(n):
            place = builder.add(builder.mul(builder.add(first, kind(m)), groups), g)
            begin = builder.mul(builder.load(builder.gep(at["xsum"], [place])), i32(-8))
            for part in range(PARTS):
                builder.store(splat(builder, begin), whole[m][part])
        with cgutils.for_range(builder, kind(GROUP_INT4 // 8)) as inner:
            k = builder.add(builder.mul(g, kind(GROUP_INT4 // 8)), inner.index)
            row = builder.gep(base, [builder.mul(k, kind(4 * PANEL))])
            for part in range(PARTS):
                both = load(builder, builder.gep(row, [kind(4 * LANES * part)]), i8, 64)
                wide = builder.lshr(builder.bitcast(both, vector(i16, 32)), constant(i16, 4, 32))
                halves = (
                    builder.and_(both, low),
                    builder.and_(builder.bitcast(wide, vector(i8, 64)), low),
                )
                for m in range(n):
                    slot = whole[m][part]
                    for half, w in enumerate(halves):
                        place = builder.add(builder.mul(quarter, kind(m)), builder.mul(k, kind(2)))
                        place = builder.add(place, kind(half))
                        x = builder.load(builder.gep(words, [place]), align=1)
                        builder.store(dot8(builder, builder.load(slot), w, x), slot)
        for part in range(PARTS):
            place = builder.add(builder.mul(g, kind(PANEL)), kind(part * LANES))
            bits = builder.zext(load(builder, builder.gep(scales, [place]), i16), vector(i32))
            scale = builder.bitcast(builder.shl(bits, constant(i32, 16)), vector(f32))
            for m in range(n):
                token = builder.mul(builder.add(first, kind(m)), builder.lshr(groups, kind(1)))
                place = builder.add(token, builder.lshr(g, kind(1)))
                x_scale = splat(builder, builder.load(builder.gep(at["xs"], [place])))
                product = builder.sitofp(builder.load(whole[m][part]), vector(f32))
                product = builder.fmul(product, scale)
                slot = sums[m][part]
                builder.store(fma(builder, product, x_scale, builder.load(slot)), slot)
    return loaded(builder, sums)


PRECISIONS = {"fp32": _fp32, "bf16": _bf16, "int8": _int8, "int4": _int4}
microkernel1, microkernel2 = _microkernel(1), _microkernel(2)
microkernel4, microkernel6 = _microkernel(4), _microkernel(6)


def number_at(weights: Any, scales: Any, panel: int, row: int, k: int) -> Any:
    """Return number k of a panel's row, in float32."""


@overload(number_at, inline="always")
def _number_at(weights, scales, panel, row, k):
    if weights.dtype == types.float32:
        return lambda weights, scales, panel, row, k: weights[panel, k, row]
    if weights.dtype == types.uint16:

        def bf16(weights, scales, panel, row, k):
            return float_of_bits(np.int32(weights[panel, k // 2, row, k % 2]) << 16)

        return bf16
    if scales.ndim == 3:

        def int4(weights, scales, panel, row, k):
            both = np.int32(weights[panel, k // 8, row, k % 4])
            whole = (both >> 4 if k % 8 >= 4 else both & 15) - 8
            return np.float32(whole) * float_of_bits(np.int32(scales[panel, k // 32, row]) << 16)

        return int4

    def int8(weights, scales, panel, row, k):
        return np.float32(np.int32(weights[panel, k // 4, row, k % 4]) - 128) * scales[panel, row]

    return int8
