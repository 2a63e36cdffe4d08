"""LLVM instructions for vectors of 16 numbers: values in, values out.

Where the CPU's registers are smaller, LLVM splits vectors; where it lacks the dot products of bytes
and of bf16, they are written with other instructions, and the sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from tiedgpt.infer.kernels.arguments import LANES


def _feature_list() -> str:
    """Return the features to compile for: NUMBA_CPU_FEATURES, or those of this CPU.

    It is empty for a CPU that NUMBA_CPU_NAME names, whose features LLVM knows.
    """
    setting: str | None = getattr(config, "CPU_FEATURES", None)
    if setting is not None or getattr(config, "CPU_NAME", None):
        return setting or ""
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this system
        return ""
    if not getattr(config, "ENABLE_AVX", True):
        features.update({name: False for name in features if name.startswith("avx")})
    return str(features.flatten())


FEATURE_LIST = _feature_list()
FEATURES = {name[1:] for name in FEATURE_LIST.split(",") if name.startswith("+")}
HAS_DOT8 = {"avx512vnni", "avx512vl"} <= FEATURES
"""Whether an instruction adds 4 products of bytes to each lane (vpdpbusd on 512 bits)."""
HAS_DOT16 = {"avx512bf16", "avx512f"} <= FEATURES
"""Whether an instruction adds 2 products of bf16 to each lane (vdpbf16ps on 512 bits)."""

i8, i16, i32, i64 = map(ir.IntType, (8, 16, 32, 64))
f32 = ir.FloatType()


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat; llvmlite has no type for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


ARRAY = None
"""Any array, whose data the instructions get the address of, or a named tuple of arrays."""


def instructions(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that writes LLVM instructions: kernels can call it.

    It is called with a builder and the values of arguments of these types.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        @wraps(write)
        def typed(typing: Any, *types_given: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                pairs = zip(signature.args, arguments, strict=True)
                values = [_addresses(context, builder, *pair) for pair in pairs]
                value = write(builder, *values)
                return context.get_dummy_value() if result == types.void else value

            pairs = zip(kinds, types_given, strict=True)
            return result(*(kind or its for kind, its in pairs)), emit

        return intrinsic(typed)

    return decorate


def _addresses(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return a value with the address of its data in the place of an array, also in a tuple."""
    if isinstance(kind, types.Array):
        return context.make_array(kind)(context, builder, value).data
    if isinstance(kind, (types.NamedTuple, types.NamedUniTuple)):
        pairs = zip(kind.types, cgutils.unpack_tuple(builder, value), strict=True)
        return kind.instance_class(*(_addresses(context, builder, *pair) for pair in pairs))
    return value


def vector(element: ir.Type, n: int = LANES) -> ir.VectorType:
    """Return the LLVM type of `n` elements."""
    return ir.VectorType(element, n)


def load(builder: Any, address: Any, element: ir.Type, n: int = LANES) -> Any:
    """Return `n` elements at an address, which need not be aligned."""
    typed = builder.bitcast(address, vector(element, n).as_pointer())
    return builder.load(typed, align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    """Write a vector to an address, which need not be aligned."""
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=1)


def splat(builder: Any, value: Any, n: int = LANES) -> Any:
    """Return a vector of `n` equal values."""
    empty = ir.Constant(vector(value.type, n), ir.Undefined)
    one = builder.insert_element(empty, value, i32(0))
    return builder.shuffle_vector(one, empty, ir.Constant(vector(i32, n), [0] * n))


def constant(element: ir.Type, value: float, n: int = LANES) -> Any:
    """Return a vector of `n` equal constants."""
    return ir.Constant(vector(element, n), [value] * n)


def call(builder: Any, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    """Call an LLVM intrinsic, or a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address; an invalid address does no harm."""
    byte = builder.bitcast(address, i8.as_pointer())
    for_reading, keep, data = i32(0), i32(3), i32(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [byte, for_reading, keep, data])


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", vector(f32), [a, b, c])


def load_float32(builder: Any, address: Any) -> Any:
    """Load 16 numbers as float32: float32 itself, bf16 (as uint16) or int8."""
    if address.type.pointee == f32:
        return load(builder, address, f32)
    if address.type.pointee == i16:
        bits = builder.zext(load(builder, address, i16), vector(i32))
        return builder.bitcast(builder.shl(bits, constant(i32, 16)), vector(f32))
    return builder.sitofp(builder.sext(load(builder, address, i8), vector(i32)), vector(f32))


def dot8(builder: Any, sums: Any, bytes_: Any, four: Any) -> Any:
    """Add to 16 sums 4 products each: 64 unsigned bytes with the 4 signed bytes of an int32."""
    if HAS_DOT8:
        arguments = [sums, builder.bitcast(bytes_, vector(i32)), splat(builder, four)]
        if llvm.llvm_version_info[0] >= 22:  # earlier ones take words
            arguments[1:] = [builder.bitcast(x, vector(i8, 64)) for x in arguments[1:]]
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", vector(i32), arguments)
    words = builder.bitcast(bytes_, vector(i32))
    for k in range(4):
        shifted = builder.lshr(words, constant(i32, 8 * k)) if k else words
        w = builder.and_(shifted, constant(i32, 255))
        x = builder.ashr(builder.shl(four, i32(24 - 8 * k)) if k < 3 else four, i32(24))
        sums = builder.add(sums, builder.mul(w, splat(builder, x)))
    return sums


def dot16(builder: Any, sums: Any, pairs: Any, two: Any) -> Any:
    """Add to 16 sums 2 products each: 32 bf16 (as 16 int32) with the 2 bf16 of an int32."""
    if HAS_DOT16:
        kind = vector(BFloatType(), 32)
        arguments = [sums, builder.bitcast(pairs, kind)]
        arguments.append(builder.bitcast(splat(builder, two), kind))
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", vector(f32), arguments)
    high = i32(0xFFFF0000)
    for shift in (True, False):
        w = (
            builder.shl(pairs, constant(i32, 16))
            if shift
            else builder.and_(pairs, splat(builder, high))
        )
        x = builder.shl(two, i32(16)) if shift else builder.and_(two, high)
        x = splat(builder, builder.bitcast(x, f32))
        sums = fma(builder, builder.bitcast(w, vector(f32)), x, sums)
    return sums


def exponential(builder: Any, x: Any) -> Any:
    """Return e^x within 2 units in the last place (Cephes' expf): 0 below -87, e^88 above 88."""

    def number(value: float) -> Any:
        return constant(f32, float(np.float32(value)))

    kind, round_to_whole = vector(f32), number(1.5 * 2**23)
    small = builder.fcmp_ordered("<", x, number(-87.0))
    x = call(builder, "llvm.maxnum.v16f32", kind, [x, number(-87.0)])
    x = call(builder, "llvm.minnum.v16f32", kind, [x, number(88.0)])
    shifted = fma(builder, x, number(1.4426950408889634), round_to_whole)
    n = builder.fsub(shifted, round_to_whole)
    r = fma(builder, n, number(-0.693359375), x)
    r = fma(builder, n, number(2.12194440e-4), r)
    y = number(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(builder, y, r, number(c))
    y = fma(builder, fma(builder, y, r, number(1.0)), r, number(1.0))
    exponent = builder.shl(builder.bitcast(shifted, vector(i32)), constant(i32, 23))
    power = builder.add(builder.bitcast(y, vector(i32)), exponent)
    return builder.select(small, number(0.0), builder.bitcast(power, kind))


def reduce_lanes(builder: Any, value: Any, join: Any) -> Any:
    """Join the halves of a vector until one number is left, and return it."""
    n = LANES
    while n > 1:
        n //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, undefined, ir.Constant(vector(i32, n), [*range(n)]))
        high = builder.shuffle_vector(
            value, undefined, ir.Constant(vector(i32, n), [*range(n, 2 * n)])
        )
        value = join(low, high)
    return builder.extract_element(value, i32(0))


def larger(builder: Any, x: Any, y: Any) -> Any:
    """Return the larger of two numbers, or of each pair of two vectors; NaN where one is NaN."""
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(builder.or_(is_nan, builder.fcmp_ordered(">", x, y)), x, y)
