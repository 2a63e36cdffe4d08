"""Attention's two products, made as those of weights are (`tiles.py`): 1 or 4 queries at a time.

One query alone waits for memory. So while it reads rows of 64 keys' numbers, it has the rows at the
same places of `after` fetched: the values that are read next; and with those the next head's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tiedgpt.infer.kernels.simd import (
    LANES,
    fma,
    pointer,
    prefetch,
    splat,
    store,
    widened,
)  # fmt: skip
from tiedgpt.infer.kernels.tiles import PANEL, PARTS, cleared, loaded, zero

LINE = 64
"""Bytes of a cache line."""


def _fetch(builder: Any, address: Any, dtype: Any) -> None:
    """Have a row of 64 numbers fetched."""
    for at in range(0, PANEL, LINE * 8 // dtype.bitwidth):
        prefetch(builder, builder.gep(address, [ir.Constant(ir.IntType(64), at)]))


def _score(n: int) -> Callable[..., None]:
    """Make the scores of 64 keys, a block, for n queries."""

    @intrinsic
    def score(typing, queries, start, stride, size, keys, span, padded, p, p_stride, after):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            q, start, stride, size, keys, span, padded, p, p_stride, after = arguments
            kinds, kind = signature.args, start.type
            sums = cleared(builder, n)
            q_at = pointer(context, builder, kinds[0], q, start)
            begin = builder.mul(span, padded)
            base = pointer(context, builder, kinds[4], keys, begin)
            next_base = pointer(context, builder, kinds[9], after, begin)
            with cgutils.for_range(builder, size) as loop:
                d = loop.index
                place = builder.mul(d, kind(PANEL))
                row = builder.gep(base, [place])
                if n == 1:
                    _fetch(builder, builder.gep(next_base, [place]), kinds[9].dtype)
                k = [
                    widened(builder, builder.gep(row, [kind(LANES * b)]), kinds[4].dtype)
                    for b in range(PARTS)
                ]
                for m in range(n):
                    place = builder.add(builder.mul(stride, kind(m)), d)
                    x = splat(builder, builder.load(builder.gep(q_at, [place])))
                    for b in range(PARTS):
                        slot = sums[m][b]
                        builder.store(fma(builder, k[b], x, builder.load(slot)), slot)
            for m, row in enumerate(loaded(builder, sums)):
                at = builder.add(builder.mul(p_stride, kind(m)), span)
                for b in range(PARTS):
                    place = builder.add(at, kind(b * LANES))
                    store(builder, row[b], pointer(context, builder, kinds[7], p, place))
            return context.get_dummy_value()

        intp = types.intp
        return types.void(queries, intp, intp, intp, keys, intp, intp, p, intp, after), emit

    return score


def _mix(n: int) -> Callable[..., None]:
    """Make the sums of values weighed by p, of n queries, 64 dimensions from `part`."""

    @intrinsic
    def mix(typing, p, p_stride, first, end, values, part, padded, out, after):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            p, p_stride, first, end, values, part, padded, out, after = arguments
            kinds, kind = signature.args, first.type
            sums = cleared(builder, n)
            base = pointer(context, builder, kinds[4], values, part)
            next_base = pointer(context, builder, kinds[8], after, part)
            weights = pointer(context, builder, kinds[0], p, zero())
            with cgutils.for_range(builder, end, start=first) as loop:
                t = loop.index
                place = builder.mul(t, padded)
                row = builder.gep(base, [place])
                if n == 1:
                    _fetch(builder, builder.gep(next_base, [place]), kinds[8].dtype)
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
            for m, row in enumerate(loaded(builder, sums)):
                for b in range(PARTS):
                    row_start = builder.mul(padded, kind(m))
                    place = builder.add(row_start, builder.add(part, kind(LANES * b)))
                    store(builder, row[b], pointer(context, builder, kinds[7], out, place))
            return context.get_dummy_value()

        intp = types.intp
        return types.void(p, intp, intp, intp, values, intp, intp, out, after), emit

    return mix


score1, score4 = _score(1), _score(4)
mix1, mix4 = _mix(1), _mix(4)
