"""The dot products of bytes of every class of CPU give the integers of numpy."""

import json
import subprocess
import sys

import numpy as np
import pytest
from numba import njit, types

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels.arguments import Matrix, Vectors
from tiedgpt.infer.kernels.microkernels import microkernel6, widen_panel, widened_microkernel6
from tiedgpt.infer.kernels.simd import ARRAY, constant, i8, i16, i32, i64, instructions, vector

NEEDS = {
    "avx512-vnni": {"avx512vnni", "avx512vl"},
    "avx-vnni": {"avx512vnni", "avx512vl"},  # the same instruction on registers of 256 bits
    "avx2": {"avx2"},
    "arm-i8mm": {"i8mm"},
    "arm-dotprod": {"dotprod"},
    "plain": set(),
}


def dot_kernel(byte_class):
    """Return a kernel that adds 4 products to each of 16 sums, in the instructions of a class."""

    @instructions(types.void, ARRAY, ARRAY, ARRAY)
    def dot(builder, sums, weights, x):
        total = simd.load(builder, sums, i32)
        four = builder.load(builder.bitcast(x, i32.as_pointer()))
        repeated = builder.bitcast(simd.splat(builder, four), vector(i8, 64))
        rows = simd.load(builder, weights, i8, 64)
        simd.store(builder, simd.BYTE_DOTS[byte_class](builder, total, rows, repeated), sums)

    return njit(lambda sums, weights, x: dot(sums, weights, x))


def operands(signed):
    """Return weights (64,), the same as signed numbers (16, 4), and vectors of 4 numbers."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 256, 64).astype(np.uint8)
    weights[:8] = [1, 255, 1, 255, 255, 1, 128, 127]
    numbers = weights.astype(np.int64) - (128 if signed else 0)
    stored = numbers.astype(np.int8) if signed else weights
    vectors = [[127, 127, 127, 127], [-127, 127, -127, -127], *rng.integers(-127, 128, (20, 4))]
    return stored, numbers.reshape(16, 4), np.array(vectors, np.int8)


@pytest.mark.parametrize("byte_class", NEEDS)
def test_dot_products_of_bytes_are_exact(byte_class):
    if not NEEDS[byte_class] <= simd.FEATURES:
        pytest.skip(f"this CPU has no {', '.join(NEEDS[byte_class] - simd.FEATURES)}")
    weights, numbers, vectors = operands(signed=byte_class in simd.SIGNED_CLASSES)
    kernel = dot_kernel(byte_class)
    for x in vectors:
        sums = np.arange(16, dtype=np.int32)
        kernel(sums, weights, x)
        np.testing.assert_array_equal(sums, np.arange(16) + numbers @ x.astype(np.int64))


@pytest.mark.skipif("avx2" not in simd.FEATURES, reason="this CPU has no AVX2")
def test_sums_of_32_products_with_4_bit_weights_fit_into_words():
    @instructions(types.void, ARRAY, ARRAY, ARRAY)
    def dot(builder, sums, weights, x):
        words = constant(i16, 0, 32)
        four = builder.load(builder.bitcast(x, i32.as_pointer()))
        repeated = builder.bitcast(simd.splat(builder, four), vector(i8, 64))
        for step in range(8):
            row = simd.load(builder, builder.gep(weights, [i64(64 * step)]), i8, 64)
            words = builder.add(words, simd.multiply_pairs(builder, row, repeated))
        simd.store(builder, simd.add_pairs(builder, words), sums)

    kernel = njit(lambda sums, weights, x: dot(sums, weights, x))
    sums, weights = np.zeros(16, np.int32), np.full((8, 64), 15, np.uint8)
    for x in (127, -127):
        kernel(sums, weights, np.full(4, x, np.int8))
        np.testing.assert_array_equal(sums, 32 * 15 * x)


@pytest.mark.skipif("avx2" not in simd.FEATURES, reason="this CPU has no AVX2")
def test_weights_widened_beforehand_give_the_same_sums():
    rng, width = np.random.default_rng(0), 256
    weights = rng.integers(1, 256, (2, width // 4, 64, 4)).astype(np.uint8)
    matrix = Matrix(weights, np.ones((2, 64), np.float32), np.zeros(128, np.float32))
    values = rng.integers(-127, 128, (12, width)).astype(np.int8)
    values[6], weights[1, :, :2] = 127, 255
    scales = rng.standard_normal((12, width // 64)).astype(np.float32)
    x = Vectors(values, scales, values.reshape(12, -1, 32).sum(2, dtype=np.int32))
    widened = np.zeros((64 + 6) * width, np.int16)
    sums, expected = np.zeros((2, 6, 64), np.float32)

    @njit
    def multiply(matrix, x, widened, sums, expected):
        widen_panel(matrix, 1, 256, widened)
        widened_microkernel6(widened, x, 6, 256, sums)
        microkernel6(matrix, 1, x, 6, 256, expected)

    multiply(matrix, x, widened, sums, expected)
    np.testing.assert_array_equal(sums, expected)
    assert np.abs(sums).min() > 0


ARM_SYSTEMS = [
    ("linux", 1 << 20, 3 << 13, {"dotprod", "i8mm", "bf16"}),
    ("linux", 1 << 20, 1 << 13, {"dotprod", "i8mm"}),
    ("linux", 1 << 20, 0, {"dotprod"}),
    ("linux", 0, 0, set()),
    ("darwin", 0, 0, {"dotprod"}),
    ("freebsd14", 1 << 20, 0, set()),
]
"""Systems on ARM CPUs, the capabilities that Linux reports (AT_HWCAP, AT_HWCAP2), the features."""


ARM_PROGRAM = """
import ctypes, importlib, json, platform, sys, types
from tiedgpt.infer.kernels import simd
platform.machine = lambda: "aarch64"
ctypes.CDLL = lambda name: types.SimpleNamespace(getauxval=getauxval)
for sys.platform, *capabilities in json.load(sys.stdin):
    def getauxval(number): return dict(zip((16, 26), capabilities))[number]
    simd.config.CPU_FEATURES = None  # as Numba begins
    importlib.reload(simd)
    print(*sorted(simd.FEATURES & {"dotprod", "i8mm", "bf16"}))
"""


def test_features_of_arm_cpus_that_llvm_does_not_report_are_found():
    *systems, expected = zip(*ARM_SYSTEMS, strict=True)
    command, asked = [sys.executable, "-c", ARM_PROGRAM], json.dumps([*zip(*systems, strict=True)])
    done = subprocess.run(command, input=asked, capture_output=True, check=True, text=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [*expected]
