"""GEMM's microkernels: 64 rows of weights times 1 to 6 vectors, for each precision of weights.

Weights lie in panels of 64 rows (`weights/formats/packed/panels.py`): at each step along a row the
64 rows' next numbers lie side by side, so that each lane of a register adds up its own row and
nothing is summed across lanes. A row's sum is thus the same for any number of vectors and of
threads. Keys and values of the cache lie in the same way, and attention's two matmuls are made
alike.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

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
    widened,
)  # fmt: skip
from tiedgpt.infer.kernels.vectors import float_of_bits

PANEL = 64
PARTS = PANEL // LANES
GROUP_INT4 = 32
"""4-bit weights that share a scale."""


class Operands(NamedTuple):
    """What a microkernel multiplies: a panel of weights, and the vectors from the first on."""

    weights: Any
    scales: Any
    x: Any
    x_scales: Any
    x_sums: Any
    width: Any


def _microkernel(n: int) -> Any:
    """Make the matmul of a panel with `n` vectors."""

    @instructions(
        types.void, ARRAY, ARRAY, types.intp, ARRAY, ARRAY, ARRAY, types.intp, types.intp, ARRAY
    )
    def microkernel(builder, w, s, panel, x, x_scales, x_sums, first, width, out):
        precision = _precision(w, s)
        panel_size = builder.mul(width, i64(PANEL // 2 if precision == "int4" else PANEL))
        at = Operands(
            weights=builder.gep(w, [builder.mul(panel, panel_size)]),
            scales=builder.gep(s, [builder.mul(panel, builder.mul(width, i64(PANEL // 32)))]),
            x=builder.gep(x, [builder.mul(first, width)]),
            x_scales=builder.gep(x_scales, [builder.mul(first, builder.lshr(width, i64(6)))]),
            x_sums=builder.gep(x_sums, [builder.mul(first, builder.lshr(width, i64(5)))]),
            width=width,
        )
        for m, row in enumerate(PRECISIONS[precision](builder, at, n)):
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


def _fp32(builder: Any, at: Operands, n: int) -> list[list[Any]]:
    """float32 weights (P, K, 64) and vectors (n, K)."""
    sums = cleared(builder, n)
    with cgutils.for_range(builder, at.width) as loop:
        k = loop.index
        row = builder.gep(at.weights, [builder.mul(k, i64(PANEL))])
        w = [load(builder, builder.gep(row, [i64(LANES * p)]), f32) for p in range(PARTS)]
        for m in range(n):
            place = builder.add(builder.mul(at.width, i64(m)), k)
            x = splat(builder, builder.load(builder.gep(at.x, [place])))
            for part, slot in zip(w, sums[m], strict=True):
                builder.store(fma(builder, part, x, builder.load(slot)), slot)
    return loaded(builder, sums)


def _bf16(builder: Any, at: Operands, n: int) -> list[list[Any]]:
    """bf16 weights (P, K/2, 64, 2) and vectors (n, K), all as uint16."""
    sums = cleared(builder, n)
    words, half = builder.bitcast(at.x, i32.as_pointer()), builder.lshr(at.width, i64(1))
    with cgutils.for_range(builder, half) as loop:
        k = loop.index
        row = builder.gep(at.weights, [builder.mul(k, i64(2 * PANEL))])
        w = [load(builder, builder.gep(row, [i64(2 * LANES * p)]), i32) for p in range(PARTS)]
        for m in range(n):
            place = builder.add(builder.mul(half, i64(m)), k)
            x = builder.load(builder.gep(words, [place]), align=2)
            for part, slot in zip(w, sums[m], strict=True):
                builder.store(dot16(builder, builder.load(slot), part, x), slot)
    return loaded(builder, sums)


def _int8(builder: Any, at: Operands, n: int) -> list[list[Any]]:
    """int8 weights + 128 (P, K/4, 64, 4); vectors as for `_integers`."""
    return _integers(builder, at, n, GROUP, offset=128, per_byte=1)


def _int4(builder: Any, at: Operands, n: int) -> list[list[Any]]:
    """4-bit weights + 8 (P, K/8, 64, 4), two in a byte; vectors as for `_integers`."""
    return _integers(builder, at, n, GROUP_INT4, offset=8, per_byte=2)


def _integers(
    builder: Any, at: Operands, n: int, group: int, *, offset: int, per_byte: int
) -> list[list[Any]]:
    """Integer weights plus an offset, and int8 vectors (n, K) with a scale for each 64.

    Products of a group are added up as int32. Where a group is one of 4-bit weights, its sum is
    multiplied with their bf16 scale, too. Each number of x is used for all 64 rows before the next
    is read. With 4 bits and six vectors, 16 rows at a time would keep 12 numbers of x beside 24
    sums, more than there are registers: that took twice as long.
    """
    sums, whole = cleared(builder, n), _variables(builder, n, vector(i32))
    words, steps = builder.bitcast(at.x, i32.as_pointer()), group // (4 * per_byte)
    with cgutils.for_range(builder, builder.udiv(at.width, i64(group))) as outer:
        g = outer.index
        for m in range(n):
            begin = splat(builder, builder.mul(_x_sum(builder, at, m, g, group), i32(-offset)))
            for slot in whole[m]:
                builder.store(begin, slot)
        with cgutils.for_range(builder, i64(steps)) as inner:
            step = builder.add(builder.mul(g, i64(steps)), inner.index)
            row = builder.gep(at.weights, [builder.mul(step, i64(4 * PANEL))])
            parts = [load(builder, builder.gep(row, [i64(64 * p)]), i8, 64) for p in range(PARTS)]
            halves = [parts] if per_byte == 1 else _halves(builder, parts)
            for half, w in enumerate(halves):
                place = builder.add(builder.mul(step, i64(per_byte)), i64(half))
                for m in range(n):
                    row_start = builder.mul(builder.lshr(at.width, i64(2)), i64(m))
                    x_at = builder.gep(words, [builder.add(row_start, place)])
                    x = builder.load(x_at, align=1)
                    for part, slot in zip(w, whole[m], strict=True):
                        builder.store(dot8(builder, builder.load(slot), part, x), slot)
        scales = _group_scales(builder, at, g) if group == GROUP_INT4 else None
        for m in range(n):
            x_scale = _x_scale(builder, at, m, builder.udiv(builder.mul(g, i64(group)), i64(GROUP)))
            for part in range(PARTS):
                product = builder.sitofp(builder.load(whole[m][part]), vector(f32))
                if scales is not None:
                    product = builder.fmul(product, scales[part])
                slot = sums[m][part]
                builder.store(fma(builder, product, x_scale, builder.load(slot)), slot)
    return loaded(builder, sums)


def _halves(builder: Any, parts: list[Any]) -> list[list[Any]]:
    """Return the low halves of bytes, and their high halves."""
    low = constant(i8, 15, 64)
    shifted = [
        builder.lshr(builder.bitcast(part, vector(i16, 32)), constant(i16, 4, 32)) for part in parts
    ]
    high = [builder.bitcast(part, vector(i8, 64)) for part in shifted]
    return [[builder.and_(part, low) for part in half] for half in (parts, high)]


def _x_sum(builder: Any, at: Operands, m: int, g: Any, group: int) -> Any:
    """Return the sum of group g of vector m, of whose 32s the sums are known."""
    of_32s = group // 32
    place = builder.mul(builder.lshr(at.width, i64(5)), i64(m))
    place = builder.add(place, builder.mul(g, i64(of_32s)))
    sums = [
        builder.load(builder.gep(at.x_sums, [builder.add(place, i64(i))])) for i in range(of_32s)
    ]
    return reduce(builder.add, sums)


def _x_scale(builder: Any, at: Operands, m: int, g: Any) -> Any:
    """Return the scale of group g of vector m, 16 times."""
    place = builder.add(builder.mul(builder.lshr(at.width, i64(6)), i64(m)), g)
    return splat(builder, builder.load(builder.gep(at.x_scales, [place])))


def _group_scales(builder: Any, at: Operands, g: Any) -> list[Any]:
    """Return the scales of group g of a panel's 4-bit weights."""
    row = builder.gep(at.scales, [builder.mul(g, i64(PANEL))])
    return [widened(builder, builder.gep(row, [i64(LANES * p)])) for p in range(PARTS)]


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
