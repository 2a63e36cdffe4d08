"""A matrix as the CPU kernels read it: panels of 64 rows, each row's next numbers side by side.

    fp32   (P, K, 64)       float32
    bf16   (P, K/2, 64, 2)  uint16, the bits
    int8   (P, K/4, 64, 4)  uint8, w/scale + 128; one float32 scale per row: (P, 64)
    int4   (P, K/8, 64, 4)  uint8, w/scale + 8: of eight numbers, number j is in the low half of
                            byte j, number 4 + j in its high half; one bf16 scale per group of 32
                            numbers: (P, K/32, 64)

P panels hold the rows, padded with zeros to a multiple of 64; K is the width, padded likewise. One
int8 scale per row serves both sides of the shared matrix: it is the token's scale where the row is
read, and the output channel's where the row predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import UserError

Precision = Literal["fp32", "bf16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PANEL = 64
GROUP_SIZE = 32
"""4-bit weights that share a scale."""
SCALE_FACTORS = (1.0, 0.92, 0.85, 1.08, 8 / 7)
"""Candidate scales of 4-bit weights, as multiples of the scale that maps the largest to -8."""
CHUNK = 64
"""Panels that are packed or unpacked at a time."""
Layout = tuple[tuple[int, ...], Any]
"""The shape and the dtype of an array."""


@dataclass(frozen=True)
class Panels:
    """A matrix (rows, width) in panels."""

    weights: NDArray[Any]
    scales: NDArray[Any]
    """(0, 0) for a precision without scales."""
    rows: int
    width: int

    @property
    def precision(self) -> Precision:
        """The precision of the weights."""
        if self.weights.dtype == np.uint8:
            return "int4" if self.scales.ndim == 3 else "int8"
        return "fp32" if self.weights.dtype == np.float32 else "bf16"


def padded(n: int) -> int:
    """Return the next multiple of 64."""
    return -(-n // PANEL) * PANEL


def layouts(precision: Precision, rows: int, width: int) -> tuple[Layout, Layout]:
    """Return the layouts of the weights and the scales of a matrix in panels."""
    p, k = padded(rows) // PANEL, padded(width)
    return {
        "fp32": (((p, k, PANEL), np.float32), ((0, 0), np.float32)),
        "bf16": (((p, k // 2, PANEL, 2), np.uint16), ((0, 0), np.float32)),
        "int8": (((p, k // 4, PANEL, 4), np.uint8), ((p, PANEL), np.float32)),
        "int4": (((p, k // 8, PANEL, 4), np.uint8), ((p, k // GROUP_SIZE, PANEL), np.uint16)),
    }[precision]


def pack(
    matrix: NDArray[Any], precision: Precision, fixed: NDArray[np.float32] | None = None
) -> Panels:
    """Pack a float32 matrix (rows, width); raise `UserError` if a weight is not finite.

    `fixed` (rows, groups) are the scales of int4's groups if they are decided.
    """
    if precision not in PRECISIONS:
        raise UserError(
            f"must be one of {', '.join(PRECISIONS)}, got {precision!r}", option="precision"
        )
    rows, width = matrix.shape
    weights, scales = (np.zeros(*layout) for layout in layouts(precision, rows, width))
    for first in range(0, len(weights), CHUNK):
        piece = matrix[first * PANEL : (first + CHUNK) * PANEL]
        block = np.zeros((padded(len(piece)), padded(width)), np.float32)
        block[: len(piece), :width] = piece
        if not np.isfinite(block).all():
            raise UserError("a weight is not a finite number")
        at = slice(first, first + len(block) // PANEL)
        if precision == "fp32":
            weights[at] = _interleaved(block, 1)[..., 0]
        elif precision == "bf16":
            weights[at] = _interleaved(to_bf16(block), 2)
        else:
            chosen = None if fixed is None else fixed[first * PANEL : (first + CHUNK) * PANEL]
            integers, scales[at] = _int8(block) if precision == "int8" else _int4(block, chosen)
            weights[at] = _interleaved(integers, 4)
    return Panels(weights, scales, rows, width)


def _int8(block: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Quantize rows (64 p, K); return them and one scale per row, (p, 64)."""
    largest = np.abs(block).max(axis=1, keepdims=True)
    usable = largest > 127 * np.finfo(np.float32).tiny  # other rows round to zeros
    scale = np.where(usable, largest / 127, 1).astype(np.float32)
    integers = np.rint(block / scale).astype(np.int16) + 128
    return integers.astype(np.uint8), scale.reshape(-1, PANEL)


def _int4(
    block: NDArray[np.float32], fixed: NDArray[np.float32] | None
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Quantize rows (64 p, K); return two numbers per byte and the bits of the groups' scales."""
    groups = block.reshape(len(block), -1, GROUP_SIZE)
    scales = _int4_scales(groups)
    if fixed is not None:
        scales[: len(fixed), : fixed.shape[1]] = fixed
    bits = to_bf16(scales)
    integers = np.clip(np.rint(groups / from_bf16(bits)[..., None]), -8, 7).astype(np.int8) + 8
    eights = integers.astype(np.uint8).reshape(len(block), -1, 2, 4)
    both = eights[:, :, 0] | (eights[:, :, 1] << 4)
    panels = bits.reshape(-1, PANEL, groups.shape[1]).transpose(0, 2, 1)
    return both.reshape(len(block), -1), panels


def _int4_scales(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale of each group (n, groups, 32) with the least squared rounding error.

    The number of largest magnitude becomes -8, as in llama.cpp's Q4_0; some scales near that one
    are tried, too.
    """
    index = np.abs(groups).argmax(axis=2)[..., None]
    extreme = np.take_along_axis(groups, index, axis=2)[..., 0]
    best = np.where(extreme != 0, extreme / -8, 1).astype(np.float32)
    least = np.full(best.shape, np.inf, np.float32)
    begin = best
    for factor in SCALE_FACTORS:
        scale = from_bf16(to_bf16(begin * np.float32(factor)))
        scale = np.where(scale == 0, 1, scale).astype(np.float32)
        rounded = np.clip(np.rint(groups / scale[..., None]), -8, 7) * scale[..., None]
        error = ((rounded - groups) ** 2).sum(axis=2)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best


def _interleaved(block: NDArray[Any], n: int) -> NDArray[Any]:
    """Rows (64 p, K) -> (p, K/n, 64, n)."""
    panels = block.reshape(-1, PANEL, block.shape[1] // n, n)
    return panels.transpose(0, 2, 1, 3)


def unpack(panels: Panels) -> NDArray[np.float32]:
    """Return the matrix (rows, width) that the panels stand for."""
    matrix = np.empty((panels.rows, panels.width), np.float32)
    for first in range(0, -(-panels.rows // PANEL), CHUNK):
        weights, scales = (a[first : first + CHUNK] for a in (panels.weights, panels.scales))
        into = matrix[first * PANEL : (first + CHUNK) * PANEL]
        into[:] = _unpacked(weights, scales, panels.precision)[: len(into), : panels.width]
    return matrix


def _unpacked(w: NDArray[Any], scales: NDArray[Any], precision: Precision) -> NDArray[Any]:
    n = 1 if precision == "fp32" else w.shape[3]
    flat = w.reshape(w.shape[0], w.shape[1], PANEL, n).transpose(0, 2, 1, 3)
    values = flat.reshape(len(w) * PANEL, -1)
    if precision == "bf16":
        return from_bf16(values)
    if precision == "int8":
        return (values.astype(np.float32) - 128) * scales.reshape(-1, 1)
    if precision == "int4":
        fours = values.reshape(len(values), -1, 1, 4)
        eights = np.concatenate([fours & 15, fours >> 4], axis=2).astype(np.float32) - 8
        scale = from_bf16(scales.transpose(0, 2, 1).reshape(len(values), -1, 1))
        values = (eights.reshape(len(values), -1, GROUP_SIZE) * scale).reshape(len(values), -1)
    return values


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round float32 to bf16, to nearest even; return the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the float32 of bf16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
