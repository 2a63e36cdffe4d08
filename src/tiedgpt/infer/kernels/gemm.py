"""GEMM: packed matrices times a few vectors or many, in chunks that threads share."""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.extending import overload

from tiedgpt.infer.kernels.microkernels import (
    PANEL,
    microkernel1,
    microkernel2,
    microkernel4,
    microkernel6,
)
from tiedgpt.infer.kernels.norms import activate
from tiedgpt.infer.kernels.quantize import quantize
from tiedgpt.infer.kernels.work_stealing import claimed

CHUNK_BYTES = 1 << 17
"""Weights of a chunk, about: long enough for a core to read ahead."""
SHARES = 8
"""Chunks that a GEMM has at least, where it has as many panels."""


def scale_rows(out: Any, n: int, scales: Any, panel: int) -> None:
    """Multiply n vectors of a panel's sums by the scales of its rows, where it has such."""


@overload(scale_rows, inline="always")
def _scale_rows(out, n, scales, panel):
    if scales.ndim == 3:
        return lambda out, n, scales, panel: None

    def scaled(out, n, scales, panel):
        if scales.shape[0] > 0:
            for m in range(n):
                for row in range(PANEL):
                    out[m, row] *= scales[panel, row]

    return scaled


@njit(error_model="numpy")
def multiply(weights, scales, panel, x, x_scales, x_sums, first, n, width, out):
    """Multiply a panel with vectors first .. first + 5 (at most, up to n); return how many."""
    left = n - first
    if left >= 6:
        microkernel6(weights, scales, panel, x, x_scales, x_sums, first, width, out)
        done = 6
    elif left >= 4:
        microkernel4(weights, scales, panel, x, x_scales, x_sums, first, width, out)
        done = 4
    elif left >= 2:
        microkernel2(weights, scales, panel, x, x_scales, x_sums, first, width, out)
        done = 2
    else:
        microkernel1(weights, scales, panel, x, x_scales, x_sums, first, width, out)
        done = 1
    scale_rows(out, done, scales, panel)
    return done


@njit(inline="always", error_model="numpy")
def panels_at_once(weights):
    """Return how many panels make a chunk."""
    panels = weights.shape[0]
    size = max(1, weights[0].nbytes)
    return max(1, min(CHUNK_BYTES // size, panels // SHARES))


@njit(error_model="numpy")
def gemm(control, phase, weights, scales, bias, x, x_scales, x_sums, n, width, added, sums, out):
    """Write W x + bias of n vectors to out (n, rows), or add it to what is there.

    `sums` (6, 64) is scratch.
    """
    panels, step = weights.shape[0], panels_at_once(weights)
    chunks = -(-panels // step)
    for chunk in claimed(control, phase, chunks):
        for panel in range(chunk * step, min((chunk + 1) * step, panels)):
            rows = slice(panel * PANEL, (panel + 1) * PANEL)
            first = 0
            while first < n:
                done = multiply(weights, scales, panel, x, x_scales, x_sums, first, n, width, sums)
                for m in range(done):
                    target, offset = out[first + m, rows], bias[rows]
                    if added:
                        for row in range(PANEL):
                            target[row] += sums[m, row] + offset[row]
                    else:
                        for row in range(PANEL):
                            target[row] = sums[m, row] + offset[row]
                first += done
    return phase + 1


@njit(error_model="numpy")
def activated_gemm(
    control, phase, weights, scales, bias, x, x_scales, x_sums, n, width, kind, sums, out,
    out_scales, out_sums,
):  # fmt: skip
    """Write activation(W x + bias) of n vectors in the dtype that the next GEMM reads."""
    panels, step = weights.shape[0], panels_at_once(weights)
    chunks = -(-panels // step)
    for chunk in claimed(control, phase, chunks):
        for panel in range(chunk * step, min((chunk + 1) * step, panels)):
            at = panel * PANEL
            first = 0
            while first < n:
                done = multiply(weights, scales, panel, x, x_scales, x_sums, first, n, width, sums)
                for m in range(done):
                    for row in range(PANEL):
                        sums[m, row] += bias[at + row]
                    activate(sums[m], PANEL, kind)
                    token = first + m
                    quantize(
                        sums[m], PANEL, out[token, at : at + PANEL],
                        out_scales[token, panel : panel + 1],
                        out_sums[token, 2 * panel : 2 * panel + 2],
                    )  # fmt: skip
                first += done
    return phase + 1
