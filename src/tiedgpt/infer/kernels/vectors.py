"""Vectors of 16 float32 as values in Numba functions.

`F16` is sixteen float32 in one register, or in several smaller ones. The functions are compiled
into whoever calls them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic, models, register_model

from tiedgpt.infer.kernels.simd import (
    call,
    exponential,
    f32,
    folded,
    i32,
    larger,
    pointer,
    prefetch,
    splat,
    store,
    vector,
    widened,
)  # fmt: skip


class _F16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="F16")


F16 = _F16()


@register_model(_F16)
class _F16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, vector(f32))


@intrinsic
def load16(typing, array, offset):
    """Load 16 numbers from element `offset` of a float32, bf16 (uint16) or int8 array's data."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = pointer(context, builder, signature.args[0], *arguments)
        return widened(builder, address, signature.args[0].dtype)

    return F16(array, types.intp), emit


@intrinsic
def store16(typing, array, offset, value):
    """Write 16 float32 to a float32 array's data."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        store(builder, arguments[2], pointer(context, builder, signature.args[0], *arguments[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, F16), emit


@intrinsic
def fetch16(typing, array, offset):
    """Have the sixteen numbers from element `offset` of a float32 array's data fetched."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch(builder, pointer(context, builder, signature.args[0], *arguments))
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@intrinsic
def float_of_bits(typing, bits):
    """Return the float32 whose bits these are."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], f32)

    return types.float32(types.int32), emit


@intrinsic
def bits_of_float(typing, value):
    """Return the bits of a float32 as int32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], i32)

    return types.int32(types.float32), emit


@intrinsic
def nearest(typing, x):
    """Return the whole number nearest to a float32, as float32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "llvm.rint.f32", f32, list(arguments))

    return types.float32(types.float32), emit


@intrinsic
def power_of_two(typing, n):
    """Return 2^n of a whole float32 from -126 to 127."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.add(builder.fptosi(arguments[0], i32), i32(127))
        return builder.bitcast(builder.shl(exponent, i32(23)), f32)

    return types.float32(types.float32), emit


def _of_vectors(n: int, body: Any) -> Any:
    """Make a function of n vectors that returns one."""
    if n == 1:

        @intrinsic
        def one(typing, a):
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return body(builder, *arguments)

            return F16(F16), emit

        return one

    @intrinsic
    def two(typing, a, b):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return body(builder, *arguments)

        return F16(F16, F16), emit

    return two


add16 = _of_vectors(2, lambda builder, a, b: builder.fadd(a, b))
scale16 = _of_vectors(2, lambda builder, a, b: builder.fmul(a, b))
max16 = _of_vectors(
    2, lambda builder, a, b: call(builder, "llvm.maxnum.v16f32", vector(f32), [a, b])
)
exp16 = _of_vectors(1, exponential)


@intrinsic
def filled16(typing, x):
    """Return sixteen times a number."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat(builder, arguments[0])

    return F16(types.float32), emit


@intrinsic
def shift16(typing, a, x, y):
    """Return (a - x) * y for numbers x and y."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, x, y = arguments
        return builder.fmul(builder.fsub(a, splat(builder, x)), splat(builder, y))

    return F16(F16, types.float32, types.float32), emit


@intrinsic
def total16(typing, a):
    """Return the sum of sixteen numbers."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return folded(builder, arguments[0], builder.fadd)

    return types.float32(F16), emit


@intrinsic
def largest16(typing, a):
    """Return the largest of sixteen numbers."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return folded(builder, arguments[0], partial(larger, builder))

    return types.float32(F16), emit
