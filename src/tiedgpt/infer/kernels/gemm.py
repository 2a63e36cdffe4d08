"""GEMM: packed matrices times a few vectors or many, in chunks that threads share."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from tiedgpt.infer.kernels import simd
from tiedgpt.infer.kernels.microkernels import (
    PANEL,
    microkernel1,
    microkernel2,
    microkernel4,
    microkernel6,
    widen_panel,
    widened_microkernel6,
)
from tiedgpt.infer.kernels.norms import activate
from tiedgpt.infer.kernels.quantize import quantize, row_of
from tiedgpt.infer.kernels.simd import jit
from tiedgpt.infer.kernels.work_stealing import claim_chunks

CHUNK_BYTES = 1 << 17
"""Approximate size of a chunk's weights: long enough for a core to read ahead."""
SHARES = 8
"""Minimum number of chunks of a GEMM, if it has as many panels."""
MIN_WIDENED_VECTORS = 32
"""Number of vectors from which AVX2 widens a panel of int8 weights once, not for every product."""


def scale_rows(out: Any, n: int, scales: Any, panel: int) -> None:
    """Multiply n vectors of a panel's sums by the scales of int8 rows."""


@overload(scale_rows, inline="always")
def _scale_rows(out, n, scales, panel):
    if scales.ndim == 3:  # 4-bit weights, whose microkernel multiplies by the scales of groups
        return lambda out, n, scales, panel: None

    def scale(out, n, scales, panel):
        if scales.shape[0] > 0:
            for m in range(n):
                for row in range(PANEL):
                    out[m, row] *= scales[panel, row]

    return scale


def multiply6(
    matrix: Any, panel: int, x: Any, first: int, n: int, width: int, widened: Any, out: Any
) -> None:
    """Multiply a panel with 6 of n vectors; `widened` keeps the panel from the first 6 on."""


@overload(multiply6, inline="always")
def _multiply6(matrix, panel, x, first, n, width, widened, out):
    weights, scales, _ = matrix.types
    if simd.BYTE_CLASS == "avx2" and weights.dtype == types.uint8 and scales.ndim == 2:

        def multiply_wide_panel(matrix, panel, x, first, n, width, widened, out):
            if n < MIN_WIDENED_VECTORS:
                microkernel6(matrix, panel, x, first, width, out)
                return
            if first == 0:
                widen_panel(matrix, panel, width, widened)
            widened_microkernel6(widened, x, first, width, out)

        return multiply_wide_panel
    return lambda matrix, panel, x, first, n, width, widened, out: microkernel6(
        matrix, panel, x, first, width, out
    )


@jit(inline="always")
def multiply(matrix, panel, x, first, n, widened, out):
    """Multiply a panel with vectors first .. first + 5 (at most, up to n); return how many."""
    remaining, width = n - first, x.values.shape[1]
    if remaining >= 6:
        done = 6
        multiply6(matrix, panel, x, first, n, width, widened, out)
    elif remaining >= 4:
        done = 4
        microkernel4(matrix, panel, x, first, width, out)
    elif remaining >= 2:
        done = 2
        microkernel2(matrix, panel, x, first, width, out)
    else:
        done = 1
        microkernel1(matrix, panel, x, first, width, out)
    scale_rows(out, done, matrix.scales, panel)
    return done


@jit
def gemm(control, phase, matrix, x, n, buffers, write, out):
    """Compute W x + bias of the first n vectors of x, and `write` it to `out`.

    `write` is one of the functions below.
    """
    sums, widened = buffers.sums[control.me], buffers.widened[control.me]
    panels = matrix.weights.shape[0]
    panel_bytes = max(1, matrix.weights[0].nbytes)
    step = max(1, min(CHUNK_BYTES // panel_bytes, panels // SHARES))  # the panels of a chunk
    for chunk in claim_chunks(control, phase, -(-panels // step)):
        for panel in range(chunk * step, min((chunk + 1) * step, panels)):
            at, first = panel * PANEL, 0
            bias = matrix.bias[at : at + PANEL]
            while first < n:
                done = multiply(matrix, panel, x, first, n, widened, sums)
                for m in range(done):
                    its = sums[m]
                    for row in range(PANEL):
                        its[row] += bias[row]
                    write(its, at, first + m, out)
                first += done
    return phase + 1


@jit
def store(sums, at, token, out):
    """Write 64 sums to columns of `out` (n, rows) from `at`."""
    target = out[token, at : at + PANEL]
    for row in range(PANEL):
        target[row] = sums[row]


@jit
def accumulate(sums, at, token, out):
    """Add 64 sums to columns of `out` (n, rows) from `at`."""
    target = out[token, at : at + PANEL]
    for row in range(PANEL):
        target[row] += sums[row]


@jit
def store_activated(sums, at, token, out):
    """Apply an activation function to 64 sums, and write them as the next GEMM reads them."""
    activate(sums, PANEL, out.activation)
    quantize(sums, at, PANEL, row_of(out.vectors, token))
