"""GEMM's microkernels: 64 rows of weights times 1 to 6 vectors, for each precision of weights.

Weights lie in panels of 64 rows (`weights/formats/packed/panels.py`): at each step along a row the
64 rows' next numbers lie side by side, so that each lane of a register adds up its own row and
nothing is summed across lanes. A row's sum is thus the same for any number of vectors and of
threads. Keys and values of the cache lie in the same way, and attention's two matmuls add up alike.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import LANES, VECTORS, Matrix, Vectors
from tiedgpt.infer.kernels.quantize import GROUP
from tiedgpt.infer.kernels.simd import ARRAY, constant, f32, i8, i16, i32, i64, instructions, vector

PANEL = 64
PARTS = PANEL // LANES
GROUP_INT4 = 32
"""The 4-bit weights that share a scale."""
AHEAD_ROWS = 4
"""Distance from the row of a panel (256 bytes) that is multiplied to the prefetched row."""


def _microkernel(n: int) -> Any:
    """Make the matmul of a panel of a `Matrix` with `n` of some `Vectors`."""

    @instructions(types.void, ARRAY, types.intp, ARRAY, types.intp, types.intp, ARRAY)
    def microkernel(builder, matrix, panel, x, first, width, out):
        """Write the sums (n, 64) of a panel's rows and the vectors from the first on."""
        precision = _precision(matrix)
        panel_size = builder.mul(width, i64(PANEL // 2 if precision == "int4" else PANEL))
        groups = builder.mul(width, i64(PANEL // GROUP_INT4))
        panel_of_it = matrix._replace(
            weights=builder.gep(matrix.weights, [builder.mul(panel, panel_size)]),
            scales=builder.gep(matrix.scales, [builder.mul(panel, groups)]),
        )
        pointers = (*panel_of_it[:2], *_vectors_from(builder, x, width, first))

        def body(builder, weights, scales, values, x_scales, x_sums, width, out):
            w, x = Matrix(weights, scales, None), Vectors(values, x_scales, x_sums)
            for parts in split_panel(n):
                rows = PRECISIONS[precision](builder, w, x, width, n, parts)
                for m, row in enumerate(rows):
                    for block, sums in zip(parts, row, strict=True):
                        target = builder.gep(out, [i64(m * PANEL + block * LANES)])
                        simd.store(builder, sums, target)

        name = f"tiedgpt_microkernel{n}_{precision}"
        simd.call_function(builder, name, body, *pointers, width, out)

    return microkernel


@instructions(types.void, ARRAY, types.intp, types.intp, ARRAY)
def widen_panel(builder, matrix, panel, width, widened):
    """Write a panel of int8 weights to `widened` as int16 (4, K/4, 2, 16, 2).

    Of four neighbours in a row, the first is paired with the third and the second with the fourth,
    because shifts of 16 bits extract every other byte.
    """
    weights = builder.gep(matrix.weights, [builder.mul(panel, builder.mul(width, i64(PANEL)))])
    with cgutils.for_range(builder, builder.lshr(width, i64(2))) as loop:
        row = builder.gep(weights, [builder.mul(loop.index, i64(4 * PANEL))])
        _prefetch_ahead(builder, row, range(PARTS), 64)
        for block in range(PARTS):
            numbers = simd.load(builder, builder.gep(row, [i64(64 * block)]), i8, 64)
            signed = builder.xor(numbers, constant(i8, -128, 64))
            words, eight = builder.bitcast(signed, vector(i16, 32)), constant(i16, 8, 32)
            at = builder.add(
                builder.mul(width, i64(block * LANES)), builder.shl(loop.index, i64(6))
            )
            for half, shifted in enumerate((builder.shl(words, eight), words)):
                target = builder.gep(widened, [builder.add(at, i64(32 * half))])
                simd.store(builder, builder.ashr(shifted, eight), target)


@instructions(types.void, ARRAY, ARRAY, types.intp, types.intp, ARRAY)
def widened_microkernel6(builder, widened, x, first, width, out):
    """Do the same as `microkernel6` with the panel that `widen_panel` wrote.

    The vectors are widened, too, and written after the panel in the same order of pairs.
    """
    n, vectors = VECTORS, _vectors_from(builder, x, width, first)
    x_words = builder.gep(widened, [builder.mul(width, i64(PANEL))])
    order = ir.Constant(vector(i32, 32), [4 * k + i for k in range(8) for i in (0, 2, 1, 3)])
    with cgutils.for_range(builder, builder.lshr(builder.mul(width, i64(n)), i64(5))) as loop:
        at = builder.shl(loop.index, i64(5))
        numbers = simd.load(builder, builder.gep(vectors.values, [at]), i8, 32)
        numbers = builder.shuffle_vector(numbers, numbers, order)
        simd.store(builder, builder.sext(numbers, vector(i16, 32)), builder.gep(x_words, [at]))
    x_pairs, n_pairs = builder.bitcast(x_words, i32.as_pointer()), builder.lshr(width, i64(1))
    starts = [builder.mul(n_pairs, i64(m)) for m in range(n)]
    for block in range(PARTS):
        rows = builder.gep(widened, [builder.mul(width, i64(block * LANES))])
        sums = zero_sums(builder, n, 1)
        totals = _variables(builder, n, 1, vector(i32))
        with cgutils.for_range(builder, builder.lshr(width, i64(6))) as outer:
            for (slot,) in totals:
                builder.store(ir.Constant(vector(i32), None), slot)
            with cgutils.for_range(builder, i64(GROUP // 2)) as inner:
                step = builder.add(builder.mul(outer.index, i64(GROUP // 2)), inner.index)
                row = simd.load(builder, builder.gep(rows, [builder.mul(step, i64(32))]), i16, 32)
                pairs = [builder.load(builder.gep(x_pairs, [builder.add(s, step)])) for s in starts]
                add_products(builder, totals, [row], pairs, _add_pairs)
            for m in range(n):
                x_row = builder.mul(builder.lshr(width, i64(6)), i64(m))
                at = builder.add(x_row, outer.index)
                x_scale = builder.load(builder.gep(vectors.scales, [at]))
                product = builder.sitofp(builder.load(totals[m][0]), vector(f32))
                total = add_scaled(builder, builder.load(sums[m][0]), product, x_scale)
                builder.store(total, sums[m][0])
        for m, (values,) in enumerate(load_sums(builder, sums)):
            simd.store(builder, values, builder.gep(out, [i64(m * PANEL + block * LANES)]))


def _add_pairs(builder: Any, totals: Any, weights: Any, pair: Any) -> Any:
    """Add 2 products of int16 to each of 16 sums."""
    x = builder.bitcast(simd.splat(builder, pair), vector(i16, 32))
    return builder.add(totals, simd.multiply_words(builder, weights, x))


def _vectors_from(builder: Any, x: Vectors, width: Any, first: Any) -> Vectors:
    """Return the vectors from number `first` on."""
    return Vectors(
        values=builder.gep(x.values, [builder.mul(first, width)]),
        scales=builder.gep(x.scales, [builder.mul(first, builder.lshr(width, i64(6)))]),
        sums=builder.gep(x.sums, [builder.mul(first, builder.lshr(width, i64(5)))]),
    )


def _precision(matrix: Matrix) -> str:
    """Return the precision of a packed matrix by the LLVM types of its arrays."""
    dtype = matrix.weights.type.pointee
    if dtype in (f32, i16):
        return "fp32" if dtype == f32 else "bf16"
    return "int4" if matrix.scales.type.pointee == i16 else "int8"


def split_panel(n: int) -> list[range]:
    """Return the parts of 16 rows that are multiplied with n vectors at a time.

    Their sums must fit into registers: 16 of 256 bits (AVX2) and 32 of 128 bits (ARM) hold those of
    4 parts with 1 vector, of 2 with 2, and of 1 with 4 or 6.
    """
    n_parts = PARTS if simd.HAS_WIDE_REGISTERS else max(1, PARTS // n)
    return [range(start, start + n_parts) for start in range(0, PARTS, n_parts)]


def _prefetch_ahead(builder: Any, row: Any, parts: range, size: int) -> None:
    """Prefetch a row that is read soon, in the first pass over its parts; CPUs read less far ahead.

    The later passes find their parts in the cache, so that memory is read in order.
    """
    if parts.start == 0 and not (simd.IS_ZEN and len(parts) == PARTS):
        for number in range(AHEAD_ROWS * PARTS, (AHEAD_ROWS + 1) * PARTS):
            simd.prefetch(builder, builder.gep(row, [i64(size * number)]))


def _variables(builder: Any, n: int, n_parts: int, vector_type: Any) -> list[list[Any]]:
    """Return slots on the stack for n rows of vectors; LLVM keeps them in registers."""
    return [[cgutils.alloca_once(builder, vector_type) for _ in range(n_parts)] for _ in range(n)]


def zero_sums(builder: Any, n: int, n_parts: int) -> list[list[Any]]:
    """Return slots for the sums of n vectors with `n_parts` parts of 16 rows, set to 0."""
    sums = _variables(builder, n, n_parts, vector(f32))
    for row in sums:
        for slot in row:
            builder.store(constant(f32, 0.0), slot)
    return sums


def load_sums(builder: Any, sums: list[list[Any]]) -> list[list[Any]]:
    """Return the sums in these slots."""
    return [[builder.load(slot) for slot in row] for row in sums]


def add_products(
    builder: Any, sums: list[list[Any]], parts: list[Any], x: list[Any], add: Any
) -> None:
    """Add to each vector's sums the 64 rows' numbers times the vector's: `add(sum, row, x)`."""
    for row, number in zip(sums, x, strict=True):
        for weights, slot in zip(parts, row, strict=True):
            builder.store(add(builder, builder.load(slot), weights, number), slot)


def add_scaled(builder: Any, total: Any, weights: Any, x: Any) -> Any:
    """Add 16 numbers times x to a sum."""
    return simd.fma(builder, weights, simd.splat(builder, x), total)


def _fp32(builder: Any, w: Matrix, x: Vectors, width: Any, n: int, parts: range) -> list[list[Any]]:
    """float32 weights (P, K, 64) and vectors (n, K)."""
    return _floats(builder, w.weights, x.values, width, n, parts, add_scaled)


def _bf16(builder: Any, w: Matrix, x: Vectors, width: Any, n: int, parts: range) -> list[list[Any]]:
    """bf16 weights (P, K/2, 64, 2) and vectors (n, K), two numbers in an int32.

    Without an instruction for bf16, both halves of the weights need registers of their own, and at
    most 4 vectors go at a time.
    """
    weights, pairs = (builder.bitcast(p, i32.as_pointer()) for p in (w.weights, x.values))
    steps, at_most = builder.lshr(width, i64(1)), n if simd.HAS_DOT16 else 4
    rows = list[list[Any]]()
    for m in range(0, n, at_most):
        group = builder.gep(pairs, [builder.mul(steps, i64(m))])
        n_group = min(at_most, n - m)
        rows += _floats(builder, weights, group, steps, n_group, parts, simd.dot16)
    return rows


def _floats(
    builder: Any, weights: Any, x: Any, steps: Any, n: int, parts: range, add: Any
) -> list[list[Any]]:
    """Add up products of weights (steps, 64) and vectors (n, steps)."""
    sums = zero_sums(builder, n, len(parts))
    with cgutils.for_range(builder, steps) as loop:
        row = builder.gep(weights, [builder.mul(loop.index, i64(PANEL))])
        addresses = [builder.gep(row, [i64(LANES * block)]) for block in parts]
        rows = [simd.load(builder, address, address.type.pointee) for address in addresses]
        _prefetch_ahead(builder, row, parts, LANES)
        starts = [builder.mul(steps, i64(m)) for m in range(n)]
        numbers = [builder.load(builder.gep(x, [builder.add(s, loop.index)])) for s in starts]
        add_products(builder, sums, rows, numbers, add)
    return load_sums(builder, sums)


def _integers(
    builder: Any, w: Matrix, x: Vectors, width: Any, n: int, parts: range, *, group: int,
    offset: int, per_byte: int,
) -> list[list[Any]]:  # fmt: skip
    """Integer weights plus an offset, and int8 vectors (n, K) with a scale for each 64.

    The weights are int8 + 128 (P, K/4, 64, 4), or 4 bits + 8 (P, K/8, 64, 4), two in a byte.
    The products of a group are added up as int32. If a group has 4-bit weights, its sum is
    multiplied by their bf16 scale, too. Each number of x is used for all rows before the next is
    read. With 4 bits and six vectors, 16 rows at a time would keep 12 numbers of x beside 24 sums,
    more than AVX-512 has registers: that took twice as long. With AVX-VNNI's 16 registers, six
    vectors at a time took 1.06 to 1.29 times as long as four and then two.
    """
    if n > 4 and per_byte == 2 and simd.BYTE_CLASS == "avx-vnni":
        multiply = partial(_integers, group=group, offset=offset, per_byte=per_byte)
        after = _vectors_from(builder, x, width, i64(4))
        rows = multiply(builder, w, x, width, 4, parts)
        return rows + multiply(builder, w, after, width, n - 4, parts)
    adds_words = per_byte == 2 and simd.BYTE_CLASS == "avx2"  # 32 x 15 x 127 is less than 2^15 x 2
    is_signed = per_byte == 1 and simd.TAKES_SIGNED_WEIGHTS
    lanes = vector(i16, 32) if adds_words else vector(i32)
    sums = zero_sums(builder, n, len(parts))
    totals = _variables(builder, n, len(parts), lanes)
    words, steps = builder.bitcast(x.values, i32.as_pointer()), group // (4 * per_byte)
    starts = [builder.mul(builder.lshr(width, i64(2)), i64(m)) for m in range(n)]
    with cgutils.for_range(builder, builder.udiv(width, i64(group))) as outer:
        g = outer.index
        begins = []
        for m in range(n):
            x_sum = i32(0) if is_signed else _x_sum(builder, x, width, m, g, group)
            begins.append(simd.splat(builder, builder.mul(x_sum, i32(-offset))))
            for slot in totals[m]:
                builder.store(ir.Constant(lanes, None) if adds_words else begins[m], slot)
        with cgutils.for_range(builder, i64(steps)) as inner:
            step = builder.add(builder.mul(g, i64(steps)), inner.index)
            row = builder.gep(w.weights, [builder.mul(step, i64(4 * PANEL))])
            rows = [simd.load(builder, builder.gep(row, [i64(64 * p)]), i8, 64) for p in parts]
            _prefetch_ahead(builder, row, parts, 64)
            if is_signed:
                rows = [builder.xor(numbers, constant(i8, -128, 64)) for numbers in rows]
            for half, its in enumerate([rows] if per_byte == 1 else _halves(builder, rows)):
                k = builder.add(builder.mul(step, i64(per_byte)), i64(half))
                fours = [builder.load(builder.gep(words, [builder.add(s, k)])) for s in starts]
                add = _add_words if adds_words else simd.dot8
                add_products(builder, totals, its, fours, add)
        row = builder.gep(w.scales, [builder.mul(g, i64(PANEL))])
        x_group = builder.udiv(builder.mul(g, i64(group)), i64(GROUP))
        for m in range(n):
            x_row = builder.mul(builder.lshr(width, i64(6)), i64(m))
            x_scale = builder.load(builder.gep(x.scales, [builder.add(x_row, x_group)]))
            for block, slot, total in zip(parts, sums[m], totals[m], strict=True):
                integers = builder.load(total)
                if adds_words:
                    integers = builder.add(simd.add_pairs(builder, integers), begins[m])
                product = builder.sitofp(integers, vector(f32))
                if group == GROUP_INT4:
                    scale = simd.load_float32(builder, builder.gep(row, [i64(LANES * block)]))
                    product = builder.fmul(product, scale)
                builder.store(add_scaled(builder, builder.load(slot), product, x_scale), slot)
    return load_sums(builder, sums)


def _add_words(builder: Any, totals: Any, weights: Any, four: Any) -> Any:
    """Add to 32 sums of 16 bits 2 products each; those of 32 4-bit weights cannot overflow."""
    x = builder.bitcast(simd.splat(builder, four), vector(i8, 64))
    return builder.add(totals, simd.multiply_pairs(builder, weights, x))


def _halves(builder: Any, parts: list[Any]) -> list[list[Any]]:
    """Return the low halves of bytes, and their high halves."""
    low = constant(i8, 15, 64)
    shifted = [
        builder.lshr(builder.bitcast(numbers, vector(i16, 32)), constant(i16, 4, 32))
        for numbers in parts
    ]
    high = [builder.bitcast(numbers, vector(i8, 64)) for numbers in shifted]
    return [[builder.and_(numbers, low) for numbers in half] for half in (parts, high)]


def _x_sum(builder: Any, x: Vectors, width: Any, m: int, g: Any, group: int) -> Any:
    """Return the sum of group g of vector m; the sums of 32 numbers are stored."""
    of_32s = group // 32
    start = builder.mul(builder.lshr(width, i64(5)), i64(m))
    start = builder.add(start, builder.mul(g, i64(of_32s)))
    addresses = [builder.add(start, i64(i)) for i in range(of_32s)]
    return reduce(
        builder.add, [builder.load(builder.gep(x.sums, [address])) for address in addresses]
    )


PRECISIONS = {
    "fp32": _fp32,
    "bf16": _bf16,
    "int8": partial(_integers, group=GROUP, offset=128, per_byte=1),
    "int4": partial(_integers, group=GROUP_INT4, offset=8, per_byte=2),
}
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
            return vec.float_of_bits(np.int32(weights[panel, k // 2, row, k % 2]) << 16)

        return bf16
    if scales.ndim == 3:

        def int4(weights, scales, panel, row, k):
            both = np.int32(weights[panel, k // 8, row, k % 4])
            integer = (both >> 4 if k % 8 >= 4 else both & 15) - 8
            return np.float32(integer) * vec.float_of_bits(
                np.int32(scales[panel, k // 32, row]) << 16
            )

        return int4

    def int8(weights, scales, panel, row, k):
        return np.float32(np.int32(weights[panel, k // 4, row, k % 4]) - 128) * scales[panel, row]

    return int8
