"""Attention's two products, made as those of weights are (`tiles.py`): 1 or 4 queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tiedgpt.infer.kernels.simd import LANES, fma, pointer, splat, store, widened
from tiedgpt.infer.kernels.tiles import PARTS, cleared, loaded, zero


def _score(n: int) -> Callable[..., None]:
    """Make the scores of 64 keys, which lie in blocks of 16, for n queries."""

    @intrinsic
    def score(typing, queries, start, stride, size, keys, span, padded, p, p_stride):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            q, start, stride, size, keys, span, padded, p, p_stride = arguments
            kinds, kind = signature.args, start.type
            sums = cleared(builder, n)
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
            for m, row in enumerate(loaded(builder, sums)):
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
            sums = cleared(builder, n)
            base = pointer(context, builder, kinds[4], values, part)
            weights = pointer(context, builder, kinds[0], p, zero())
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
            for m, row in enumerate(loaded(builder, sums)):
                for b in range(PARTS):
                    row_start = builder.mul(padded, kind(m))
                    place = builder.add(row_start, builder.add(part, kind(LANES * b)))
                    store(builder, row[b], pointer(context, builder, kinds[7], out, place))
            return context.get_dummy_value()

        intp = types.intp
        return types.void(p, intp, intp, intp, values, intp, intp, out), emit

    return mix


score1, score4 = _score(1), _score(4)
mix1, mix4 = _mix(1), _mix(4)
