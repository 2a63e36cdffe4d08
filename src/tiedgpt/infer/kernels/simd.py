"""LLVM instructions for vectors of 16 numbers: values in, values out.

LLVM splits a vector over several registers where the CPU's are smaller. The dot product of bytes is
written once for each class of CPU (`BYTE_CLASS`); all classes return the same integers.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.fields import Fields, read_field

ARM_CAPABILITIES = {"dotprod": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}
"""Features of ARM CPUs: the kind of value that Linux's `getauxval` returns, and its bit."""


def _arm_features() -> dict[str, bool]:
    """Return features of this ARM CPU that LLVM reports on Windows alone."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return {}
    if sys.platform != "linux":
        return {"dotprod": True} if sys.platform == "darwin" else {}  # all of Apple's
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name: read(at) >> bit & 1 == 1 for name, (at, bit) in ARM_CAPABILITIES.items()}


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
        features = llvm.FeatureMap()
    features.update(_arm_features())
    if not getattr(config, "ENABLE_AVX", True):
        features.update({name: False for name in features if name.startswith("avx")})
    return str(features.flatten())


FEATURE_LIST = _feature_list()
if _arm_features():  # Numba compiles for them, too
    config.CPU_FEATURES = FEATURE_LIST  # type: ignore[attr-defined]
FEATURES = {name[1:] for name in FEATURE_LIST.split(",") if name.startswith("+")}


def byte_class(features: set[str]) -> str:
    """Return the class of instructions for dot products of bytes: a key of `BYTE_DOTS`."""
    if {"avx512vnni", "avx512vl"} <= features:
        return "avx512-vnni"
    if "avxvnni" in features:
        return "avx-vnni"
    if "avx2" in features:
        return "avx2"
    if "i8mm" in features:
        return "arm-i8mm"
    return "arm-dotprod" if "dotprod" in features else "plain"


CPU_NAME: str = getattr(config, "CPU_NAME", None) or llvm.get_host_cpu_name()
IS_ZEN = CPU_NAME.startswith("znver")
"""Whether this is one of AMD's Zen CPUs, which prefetch rows that are read whole by themselves."""
HAS_WIDE_REGISTERS = "avx512f" in FEATURES
"""Whether a register holds 16 float32; 4 accumulators of 16 numbers fit for each of 6 vectors."""
HAS_BFDOT = "bf16" in FEATURES
HAS_DOT16 = HAS_BFDOT or {"avx512bf16", "avx512f"} <= FEATURES
"""Whether an instruction adds 2 products of bf16 to each lane (vdpbf16ps, or bfdot on ARM)."""

i8, i16, i32, i64 = map(ir.IntType, (8, 16, 32, 64))
f32, f64 = ir.FloatType(), ir.DoubleType()


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat; llvmlite has no type for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


jit = partial(njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Numba's decorator for kernels and the functions that they call, but not for Python's calls.

Without wrappers for Python, they are compiled in three quarters of the time.
"""

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
            return result(*(override or default for override, default in pairs)), emit

        return intrinsic(typed)

    return decorate


def _addresses(context: Any, builder: Any, numba_type: Any, value: Any) -> Any:
    """Return a value with the address of its data in the place of an array, also in a tuple."""
    if isinstance(numba_type, types.Array):
        return context.make_array(numba_type)(context, builder, value).data
    if isinstance(numba_type, (types.NamedTuple, types.NamedUniTuple)):
        pairs = zip(numba_type.types, cgutils.unpack_tuple(builder, value), strict=True)
        return numba_type.instance_class(*(_addresses(context, builder, *pair) for pair in pairs))
    if isinstance(numba_type, Fields):
        items = [
            read_field(context, builder, numba_type, value, name) for name in numba_type.fields
        ]
        pairs = zip(numba_type.types, items, strict=True)
        return numba_type.instance_class(*(_addresses(context, builder, *pair) for pair in pairs))
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
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, arguments)


def call_function(builder: Any, name: str, write: Callable[..., None], *arguments: Any) -> None:
    """Call a function without result; a module's first call defines it by `write`.

    Instructions that several functions contain are then compiled once.
    """
    function = builder.module.globals.get(name)
    if function is None:
        signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = ir.Function(builder.module, signature, name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        write(inside, *function.args)
        inside.ret_void()
    builder.call(function, arguments)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address; an invalid address does no harm."""
    byte = builder.bitcast(address, i8.as_pointer())
    for_reading, keep, data = i32(0), i32(3), i32(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [byte, for_reading, keep, data])


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once, for vectors of float32 or of float64."""
    bits = 32 if a.type.element == f32 else 64
    return call(builder, f"llvm.fma.v16f{bits}", a.type, [a, b, c])


def load_float32(builder: Any, address: Any) -> Any:
    """Load 16 numbers as float32: float32 itself, bf16 (as uint16) or int8."""
    if address.type.pointee == f32:
        return load(builder, address, f32)
    if address.type.pointee == i16:
        bits = builder.zext(load(builder, address, i16), vector(i32))
        return builder.bitcast(builder.shl(bits, constant(i32, 16)), vector(f32))
    return builder.sitofp(builder.sext(load(builder, address, i8), vector(i32)), vector(f32))


def _split(builder: Any, value: Any, n_parts: int) -> list[Any]:
    """Return the parts of a vector, each of a register's size."""
    n = value.type.count // n_parts
    undefined = ir.Constant(value.type, ir.Undefined)
    masks = [ir.Constant(vector(i32, n), [*range(p * n, p * n + n)]) for p in range(n_parts)]
    return [builder.shuffle_vector(value, undefined, mask) for mask in masks]


def _join(builder: Any, parts: list[Any]) -> Any:
    """Return one vector of several."""
    while len(parts) > 1:
        mask = ir.Constant(vector(i32, 2 * parts[0].type.count), [*range(2 * parts[0].type.count)])
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(low, high, mask) for low, high in pairs]
    return parts[0]


def _call_on_parts(builder: Any, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    """Call an intrinsic of smaller registers on each part of its arguments, and join the results.

    `result` is the type of one part.
    """
    n_parts = 512 // (result.count * (32 if result.element == f32 else result.element.width))
    parts = zip(*(_split(builder, x, n_parts) for x in arguments), strict=True)
    return _join(builder, [call(builder, name, result, list(registers)) for registers in parts])


def _vnni(builder: Any, sums: Any, weights: Any, x: Any, bits: int) -> Any:
    """`vpdpbusd` on registers of 512 or 256 bits: 1 instruction a register."""
    name = f"llvm.x86.avx512.vpdpbusd.{bits}"
    if llvm.llvm_version_info[0] < 22:  # takes words
        weights, x = (builder.bitcast(value, vector(i32)) for value in (weights, x))
    return _call_on_parts(builder, name, vector(i32, bits // 32), [sums, weights, x])


def _avx2(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """`vpmaddubsw` of |x| and of weights with the sign of x, then `vpmaddwd`: 4 instructions.

    Signed weights of at most 127 and |x| of at most 127 give pairs of at most 2 x 127 x 127, which
    16 bits hold: nothing saturates.
    """
    size = call(builder, "llvm.abs.v64i8", x.type, [x, ir.Constant(ir.IntType(1), 0)])
    vector_type = vector(i8, 32)
    signed = _call_on_parts(builder, "llvm.x86.avx2.psign.b", vector_type, [weights, x])
    return builder.add(sums, add_pairs(builder, multiply_pairs(builder, size, signed)))


def multiply_pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Return the 32 sums of 2 products of bytes in 16 bits (AVX2's `vpmaddubsw`)."""
    vector_type = vector(i16, 16)
    return _call_on_parts(builder, "llvm.x86.avx2.pmadd.ub.sw", vector_type, [unsigned, signed])


def add_pairs(builder: Any, words: Any) -> Any:
    """Return the 16 sums of two neighbouring words each (AVX2's `vpmaddwd`)."""
    return multiply_words(builder, words, constant(i16, 1, 32))


def multiply_words(builder: Any, words: Any, x: Any) -> Any:
    """Return the 16 sums of the products of two neighbouring words each (AVX2's `vpmaddwd`)."""
    return _call_on_parts(builder, "llvm.x86.avx2.pmadd.wd", vector(i32, 8), [words, x])


def _arm(builder: Any, sums: Any, weights: Any, x: Any, name: str) -> Any:
    """`sdot`, or `usdot` of unsigned weights: 1 instruction a register of 128 bits."""
    name = f"llvm.aarch64.neon.{name}.v4i32.v16i8"
    return _call_on_parts(builder, name, vector(i32, 4), [sums, weights, x])


def _multiply_widened(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """Shifts and 32-bit multiplications, for any CPU."""
    words, fours = (builder.bitcast(value, vector(i32)) for value in (weights, x))
    for k in range(4):
        w = builder.and_(builder.lshr(words, constant(i32, 8 * k)), constant(i32, 255))
        at_top = builder.shl(fours, constant(i32, 24 - 8 * k))
        sums = builder.add(sums, builder.mul(w, builder.ashr(at_top, constant(i32, 24))))
    return sums


BYTE_DOTS: dict[str, Callable[..., Any]] = {
    "avx512-vnni": partial(_vnni, bits=512),
    "avx-vnni": partial(_vnni, bits=256),
    "avx2": _avx2,
    "arm-i8mm": partial(_arm, name="usdot"),
    "arm-dotprod": partial(_arm, name="sdot"),
    "plain": _multiply_widened,
}
"""The dot products of bytes by class; `dot8` calls that of this CPU."""
BYTE_CLASS = byte_class(FEATURES)
SIGNED_CLASSES = ("avx2", "arm-dotprod")
"""The classes whose weights are signed, -127 to 127; those of the others are unsigned."""
TAKES_SIGNED_WEIGHTS = BYTE_CLASS in SIGNED_CLASSES


def dot8(builder: Any, sums: Any, weights: Any, four: Any) -> Any:
    """Add to 16 sums 4 products each: 64 bytes of weights with the 4 signed bytes of an int32.

    Weights are unsigned, or signed where `TAKES_SIGNED_WEIGHTS`; from 0 to 127 they may be either.
    """
    x = builder.bitcast(splat(builder, four), vector(i8, 64))
    return BYTE_DOTS[BYTE_CLASS](builder, sums, weights, x)


def dot16(builder: Any, sums: Any, pairs: Any, two: Any) -> Any:
    """Add to 16 sums 2 products each: 32 bf16 (as 16 int32) with the 2 bf16 of an int32."""
    if HAS_DOT16:
        name, n = "llvm.x86.avx512bf16.dpbf16ps.512", LANES
        if HAS_BFDOT:
            name, n = "llvm.aarch64.neon.bfdot.v4f32.v8bf16", 4
        bf16s = [builder.bitcast(x, vector(BFloatType(), 32)) for x in (pairs, splat(builder, two))]
        return _call_on_parts(builder, name, vector(f32, n), [sums, *bf16s])
    both, high = splat(builder, two), constant(i32, 0xFFFF0000)
    for shifts in (True, False):
        w, x = (
            builder.shl(value, constant(i32, 16)) if shifts else builder.and_(value, high)
            for value in (pairs, both)
        )
        sums = fma(builder, builder.bitcast(w, vector(f32)), builder.bitcast(x, vector(f32)), sums)
    return sums


def exponential(builder: Any, x: Any) -> Any:
    """Return e^x within 2 units in the last place (Cephes' expf): 0 below -87, e^88 above 88."""

    def number(value: float) -> Any:
        return constant(f32, float(np.float32(value)))

    vector_type, round_to_whole = vector(f32), number(1.5 * 2**23)
    small = builder.fcmp_ordered("<", x, number(-87.0))
    x = call(builder, "llvm.maxnum.v16f32", vector_type, [x, number(-87.0)])
    x = call(builder, "llvm.minnum.v16f32", vector_type, [x, number(88.0)])
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
    return builder.select(small, number(0.0), builder.bitcast(power, vector_type))


def exponential64(builder: Any, x: Any) -> Any:
    """Return e^x of float64, x <= 0, within 1e-15 of itself: e^-700 below -700 and of NaN."""
    round_to_whole = constant(f64, 1.5 * 2**52)
    x = call(builder, "llvm.maxnum.v16f64", x.type, [x, constant(f64, -700.0)])
    shifted = fma(builder, x, constant(f64, 1 / math.log(2)), round_to_whole)
    n = builder.fsub(shifted, round_to_whole)
    r = fma(builder, n, constant(f64, -math.log(2)), x)
    r = fma(builder, n, constant(f64, -2.3190468138462996e-17), r)  # the rest of log 2
    y = constant(f64, 1 / math.factorial(13))  # a Taylor series
    for power in range(12, -1, -1):
        y = fma(builder, y, r, constant(f64, 1 / math.factorial(power)))
    exponent = builder.shl(builder.bitcast(shifted, vector(i64)), constant(i64, 52))
    return builder.bitcast(builder.add(builder.bitcast(y, vector(i64)), exponent), x.type)


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
