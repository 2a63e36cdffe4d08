"""Vectors of 16 float32 as values in Numba functions.

`F16` is sixteen float32 in one register, or in several smaller ones; `D16` is sixteen float64. The
functions are inlined. A kernel calls them by the module's name: `vec.load(array, offset)`.
"""

from __future__ import annotations

from functools import partial

import numba
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.simd import (
    ARRAY,
    call,
    f32,
    f64,
    i16,
    i32,
    i64,
    instructions,
    jit,
    vector,
)


class _F16(types.Type):
    def __init__(self):
        super().__init__(name="F16")


class _D16(types.Type):
    def __init__(self):
        super().__init__(name="D16")


F16, D16 = _F16(), _D16()


@register_model(_F16)
class _F16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector(f32))


@register_model(_D16)
class _D16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector(f64))


@instructions(F16, ARRAY, types.intp)
def load(builder, array, offset):
    """Load 16 numbers from element `offset` of a float32, bf16 (uint16) or int8 array's data."""
    return simd.load_float32(builder, builder.gep(array, [offset]))


@instructions(types.void, ARRAY, types.intp, F16)
def store(builder, array, offset, a):
    """Write 16 float32 to a float32 array's data."""
    simd.store(builder, a, builder.gep(array, [offset]))


@instructions(types.void, ARRAY, types.intp)
def prefetch(builder, array, offset):
    """Prefetch the sixteen numbers from element `offset` of a float32 array's data."""
    simd.prefetch(builder, builder.gep(array, [offset]))


@instructions(types.float32, types.int32)
def float_of_bits(builder, bits):
    """Return the float32 whose bits these are."""
    return builder.bitcast(bits, f32)


@instructions(types.int32, types.float32)
def bits_of_float(builder, x):
    """Return the bits of a float32 as int32."""
    return builder.bitcast(x, i32)


@instructions(types.float32, types.float32)
def nearest(builder, x):
    """Return the whole number nearest to a float32, as float32."""
    return call(builder, "llvm.rint.f32", f32, [x])


@instructions(F16, F16, F16)
def add(builder, a, b):
    """Return the sums of pairs."""
    return builder.fadd(a, b)


@instructions(F16, F16, F16)
def multiply(builder, a, b):
    """Return the products of pairs."""
    return builder.fmul(a, b)


@instructions(F16, F16, F16)
def divide(builder, a, b):
    """Return the quotients of pairs."""
    return builder.fdiv(a, b)


@instructions(F16, F16, F16)
def maximum(builder, a, b):
    """Return the larger of each pair, a number where one is NaN."""
    return call(builder, "llvm.maxnum.v16f32", a.type, [a, b])


@instructions(F16, F16, F16)
def larger(builder, a, b):
    """Return the larger of each pair, NaN where one is NaN."""
    return simd.larger(builder, a, b)


@instructions(F16, F16)
def exp(builder, a):
    """Return e^a; see `simd.exponential`."""
    return simd.exponential(builder, a)


@instructions(F16, types.float32)
def splat(builder, x):
    """Return a vector of sixteen equal numbers."""
    return simd.splat(builder, x)


@instructions(F16, F16, types.float32, types.float32)
def shift(builder, a, x, y):
    """Return (a - x) * y for numbers x and y."""
    return builder.fmul(builder.fsub(a, simd.splat(builder, x)), simd.splat(builder, y))


@instructions(types.float32, F16)
def total(builder, a):
    """Return the sum of sixteen numbers."""
    return simd.reduce_lanes(builder, a, builder.fadd)


@instructions(types.float32, F16)
def largest(builder, a):
    """Return the largest of sixteen numbers, NaN if one is NaN."""
    return simd.reduce_lanes(builder, a, partial(simd.larger, builder))


@instructions(F16, types.intp)
def count_from(builder, first):
    """Return the bits of sixteen int32 that count from `first`."""
    steps = ir.Constant(vector(i32), [*range(LANES)])
    numbers = builder.add(simd.splat(builder, builder.trunc(first, i32)), steps)
    return builder.bitcast(numbers, vector(f32))


def _comparison(sign):
    """Make a function that compares a vector with a number and returns a bit for each lane."""

    @instructions(types.intp, F16, types.float32)
    def compare(builder, a, x):
        is_true = builder.fcmp_ordered(sign, a, simd.splat(builder, x))
        return builder.zext(builder.bitcast(is_true, i16), i64)

    return compare


above, at_least, equal = _comparison(">"), _comparison(">="), _comparison("==")


def _mask(builder, bits):
    return builder.bitcast(builder.trunc(bits, i16), vector(ir.IntType(1)))


@instructions(D16, types.float64)
def splat64(builder, x):
    """Return a vector of sixteen equal float64."""
    return simd.splat(builder, x)


@instructions(D16, F16)
def widen(builder, a):
    """Return sixteen float32 as float64."""
    return builder.fpext(a, vector(f64))


@instructions(D16, F16, types.float32, types.float64)
def exp64(builder, a, x, divisor):
    """Return e^((a - x) / divisor) in float64."""
    shifts = simd.splat(builder, builder.fpext(x, f64))
    differences = builder.fsub(builder.fpext(a, vector(f64)), shifts)
    return simd.exponential64(builder, builder.fdiv(differences, simd.splat(builder, divisor)))


@instructions(D16, D16, D16)
def add64(builder, a, b):
    """Return the sums of pairs of float64."""
    return builder.fadd(a, b)


@instructions(D16, D16, D16, types.intp)
def add_masked64(builder, a, b, bits):
    """Return a + b in the lanes whose bits are set, and a in the others."""
    return builder.select(_mask(builder, bits), builder.fadd(a, b), a)


@instructions(types.float64, D16)
def total64(builder, a):
    """Return the sum of sixteen float64."""
    return simd.reduce_lanes(builder, a, builder.fadd)


@instructions(types.void, ARRAY, types.intp, F16, types.intp)
def compress(builder, array, offset, a, bits):
    """Write the lanes whose bits are set side by side; 16 places are written."""
    values = [a, _mask(builder, bits), ir.Constant(a.type, ir.Undefined)]
    packed = call(builder, "llvm.experimental.vector.compress.v16f32", a.type, values)
    simd.store(builder, packed, builder.gep(array, [offset]))


@instructions(types.intp, types.intp)
def count_bits(builder, bits):
    """Return how many bits are set."""
    return call(builder, "llvm.ctpop.i64", i64, [bits])


@instructions(types.CPointer(types.float32), types.intp)
def _pointer(builder, address):
    return builder.inttoptr(address, f32.as_pointer())


@jit(inline="always")
def array_at(address, size):
    """Return the float32 array of `size` numbers at an address."""
    return numba.carray(_pointer(address), (size,))
