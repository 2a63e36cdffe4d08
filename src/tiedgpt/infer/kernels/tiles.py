"""A product's heart: 64 rows of weights times 1 to 6 vectors, for each form of weights.

Weights lie in panels of 64 rows (`weights/packed/panels.py`): at each step along a row the 64 rows' next
numbers lie side by side, so that each lane of a register adds up its own row and nothing is summed
across lanes. A row's sum is thus the same for any number of vectors and of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tiedgpt.infer.kernels.simd import (
    LANES, constant, dot8, dot16, f32, fma, i8, i16, i32, load, pointer, splat, store, vector, widened,
)  # fmt: skip

PANEL = 64
PARTS = PANEL // LANES
GROUP = 64
"""Activations that share a scale, where they are bytes."""
NIBBLES = 32
"""4-bit weights that share a scale."""


def _tile(n: int) -> Callable[..., None]:
    """Make the product of a panel with `n` vectors."""

    @intrinsic
    def tile(
        typing: Any, weights: Any, scales: Any, panel: Any, x: Any, x_scales: Any, x_sums: Any,
        first: Any, width: Any, out: Any,
    ) -> Any:  # fmt: skip
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            w, s, panel, x, xs, xsum, first, width, out = arguments
            kinds = signature.args
            at = {
                "w": pointer(context, builder, kinds[0], w, _zero()),
                "s": pointer(context, builder, kinds[1], s, _zero()),
                "x": pointer(context, builder, kinds[3], x, builder.mul(first, width)),
                "xs": pointer(context, builder, kinds[4], xs, _zero()),
                "xsum": pointer(context, builder, kinds[5], xsum, _zero()),
            }
            form = form_of(kinds[0], kinds[1])
            sums = FORMS[form](builder, at, panel, first, width, n)
            for m in range(n):
                for part in range(PARTS):
                    place = ir.Constant(panel.type, m * PANEL + part * LANES)
                    store(builder, sums[m][part], pointer(context, builder, kinds[8], out, place))
            return context.get_dummy_value()

        signature = types.void(
            weights, scales, types.intp, x, x_scales, x_sums, types.intp, types.intp, out
        )
        return signature, emit

    return tile


def form_of(weights: Any, scales: Any) -> str:
    """Return the form of weights by the types of a packed matrix's arrays."""
    if weights.dtype == types.float32:
        return "fp32"
    if weights.dtype == types.uint16:
        return "bf16"
    return "int4" if scales.ndim == 3 else "int8"


def _zero() -> Any:
    return ir.Constant(ir.IntType(64), 0)



def _variables(builder: Any, n: int, kind: Any) -> list[list[Any]]:
    return [[cgutils.alloca_once(builder, kind) for _ in range(PARTS)] for _ in range(n)]


def _cleared(builder: Any, n: int) -> list[list[Any]]:
    sums = _variables(builder, n, vector(f32))
    for row in sums:
        for slot in row:
            builder.store(constant(f32, 0.0), slot)
    return sums


def _loaded(builder: Any, slots: list[list[Any]]) -> list[list[Any]]:
    return [[builder.load(slot) for slot in row] for row in slots]


def _plain(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """float32 weights (P, K, 64) and vectors (n, K)."""
    sums = _cleared(builder, n)
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
    return _loaded(builder, sums)


def _pairs(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """bf16 weights (P, K/2, 64, 2) and vectors (n, K), all as uint16."""
    sums = _cleared(builder, n)
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
    return _loaded(builder, sums)


def _bytes(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """int8 weights + 128 (P, K/4, 64, 4), int8 vectors (n, K) with a scale for each 64."""
    sums, whole = _cleared(builder, n), _variables(builder, n, vector(i32))
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
                load(builder, builder.gep(row, [kind(4 * LANES * p)]), i8, 64)
                for p in range(PARTS)
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
    return _loaded(builder, sums)


def _nibbles(builder: Any, at: dict[str, Any], panel: Any, first: Any, width: Any, n: int) -> Any:
    """4-bit weights + 8 (P, K/8, 64, 4), with a bf16 scale for each 32; vectors as for int8."""
    sums, whole = _cleared(builder, n), _variables(builder, n, vector(i32))
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
        with cgutils.for_range(builder, kind(NIBBLES // 8)) as inner:
            k = builder.add(builder.mul(g, kind(NIBBLES // 8)), inner.index)
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
    return _loaded(builder, sums)


FORMS = {"fp32": _plain, "bf16": _pairs, "int8": _bytes, "int4": _nibbles}
tile1, tile2, tile4, tile6 = _tile(1), _tile(2), _tile(4), _tile(6)


def _score(n: int) -> Callable[..., None]:
    """Make the scores of 64 keys, which lie in blocks of 16, for n queries."""

    @intrinsic
    def score(typing, queries, start, stride, size, keys, span, padded, p, p_stride):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            q, start, stride, size, keys, span, padded, p, p_stride = arguments
            kinds, kind = signature.args, start.type
            sums = _cleared(builder, n)
            q_at = pointer(context, builder, kinds[0], q, start)
            base = pointer(context, builder, kinds[4], keys, builder.mul(span, padded))
            block = builder.mul(padded, kind(LANES))
            with cgutils.for_range(builder, size) as loop:
                d = loop.index
                row = builder.gep(base, [builder.mul(d, kind(LANES))])
                k = [
                    widened(
                        builder, builder.gep(row, [builder.mul(block, kind(b))]), kinds[4].dtype
                    )
                    for b in range(PARTS)
                ]
                for m in range(n):
                    place = builder.add(builder.mul(stride, kind(m)), d)
                    x = splat(builder, builder.load(builder.gep(q_at, [place])))
                    for b in range(PARTS):
                        slot = sums[m][b]
                        builder.store(fma(builder, k[b], x, builder.load(slot)), slot)
            for m, row in enumerate(_loaded(builder, sums)):
                at = builder.add(builder.mul(p_stride, kind(m)), span)
                for b in range(PARTS):
                    place = builder.add(at, kind(b * LANES))
                    store(builder, row[b], pointer(context, builder, kinds[7], p, place))
            return context.get_dummy_value()

        intp = types.intp
        return types.void(queries, intp, intp, intp, keys, intp, intp, p, intp), emit

    return score


def _mix(n: int) -> Callable[..., None]:
    """Make the sums of values weighed by p, of n queries, 64 dimensions from `part`."""

    @intrinsic
    def mix(typing, p, p_stride, first, end, values, part, padded, out):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            p, p_stride, first, end, values, part, padded, out = arguments
            kinds, kind = signature.args, first.type
            sums = _cleared(builder, n)
            base = pointer(context, builder, kinds[4], values, part)
            weights = pointer(context, builder, kinds[0], p, _zero())
            with cgutils.for_range(builder, end, start=first) as loop:
                t = loop.index
                row = builder.gep(base, [builder.mul(t, padded)])
                v = [
                    widened(builder, builder.gep(row, [kind(LANES * b)]), kinds[4].dtype)
                    for b in range(PARTS)
                ]
                for m in range(n):
                    place = builder.add(builder.mul(p_stride, kind(m)), t)
                    x = splat(builder, builder.load(builder.gep(weights, [place])))
                    for b in range(PARTS):
                        slot = sums[m][b]
                        builder.store(fma(builder, v[b], x, builder.load(slot)), slot)
            for m, row in enumerate(_loaded(builder, sums)):
                for b in range(PARTS):
                    place = builder.add(builder.mul(padded, kind(m)), builder.add(part, kind(LANES * b)))
                    store(builder, row[b], pointer(context, builder, kinds[7], out, place))
            return context.get_dummy_value()

        intp = types.intp
        return types.void(p, intp, intp, intp, values, intp, intp, out), emit

    return mix


score1, score4 = _score(1), _score(4)
mix1, mix4 = _mix(1), _mix(4)
