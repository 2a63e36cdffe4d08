"""A matrix as CPU kernels read it: panels of 64 rows, each row's next numbers side by side.

    fp32   (P, K, 64)       float32
    bf16   (P, K/2, 64, 2)  uint16, the bits
    int8   (P, K/4, 64, 4)  uint8, w/scale + 128 with one float32 scale a row          (P, 64)
    int4   (P, K/8, 64, 4)  uint8, w/scale + 8: number j of the eight in the low half of byte j,
                            number 4 + j in its high half; a bf16 scale for each 32    (P, K/32, 64)

P panels hold the rows, padded with zeros to a multiple of 64; K is the width, padded so, too. The
one scale a row of int8 serves both faces of the shared matrix: it is the token's where the row is
read, and the output channel's where the row predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import UserError

Form = Literal["fp32", "bf16", "int8", "int4"]
FORMS: tuple[Form, ...] = get_args(Form)
PANEL = 64
NIBBLES = 32
"""4-bit weights that share a scale."""
CHUNK = 64
"""Panels packed at a time."""


@dataclass(frozen=True)
class Panels:
    """A matrix (rows, width) in panels."""

    weights: NDArray[Any]
    scales: NDArray[Any]
    """Of a form without scales: an empty (0, 0)."""
    rows: int
    width: int

    @property
    def form(self) -> Form:
        """How the weights are written."""
        if self.weights.dtype == np.float32:
            return "fp32"
        if self.weights.dtype == np.uint16:
            return "bf16"
        return "int4" if self.scales.ndim == 3 else "int8"

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.weights.nbytes + self.scales.nbytes


def padded(n: int) -> int:
    """Return the next multiple of 64."""
    return -(-n // PANEL) * PANEL


def shapes(form: Form, rows: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of weights and scales of a matrix in panels."""
    p, k = padded(rows) // PANEL, padded(width)
    return {
        "fp32": ((p, k, PANEL), (0, 0)),
        "bf16": ((p, k // 2, PANEL, 2), (0, 0)),
        "int8": ((p, k // 4, PANEL, 4), (p, PANEL)),
        "int4": ((p, k // 8, PANEL, 4), (p, k // NIBBLES, PANEL)),
    }[form]


DTYPES: dict[Form, tuple[Any, Any]] = {
    "fp32": (np.float32, np.float32),
    "bf16": (np.uint16, np.float32),
    "int8": (np.uint8, np.float32),
    "int4": (np.uint8, np.uint16),
}
"""Of weights and scales."""


def pack(matrix: NDArray[Any], form: Form) -> Panels:
    """Return a float32 matrix (rows, width) in panels; raise `UserError` if it is not finite."""
    if form not in FORMS:
        raise UserError(f"{form!r} is no form of packed weights: there are {', '.join(FORMS)}")
    rows, width = matrix.shape
    weight_shape, scale_shape = shapes(form, rows, width)
    weights = np.zeros(weight_shape, DTYPES[form][0])
    scales = np.zeros(scale_shape, DTYPES[form][1])
    for first in range(0, len(weights), CHUNK):
        part = matrix[first * PANEL : (first + CHUNK) * PANEL]
        block = np.zeros((padded(len(part)), padded(width)), np.float32)
        block[: len(part), :width] = part
        if not np.isfinite(block).all():
            raise UserError("a weight is not a finite number: there is nothing to pack")
        at = slice(first, first + len(block) // PANEL)
        weights[at] = _laid_out(block, form, scales, at)
    return Panels(weights, scales, rows, width)


def _laid_out(block: NDArray[np.float32], form: Form, scales: NDArray[Any], at: slice) -> Any:
    """Return whole panels of rows (n, K) in their layout; fill in their scales."""
    if form == "fp32":
        return _interleaved(block, 1)[..., 0]
    if form == "bf16":
        return _interleaved(to_bf16(block), 2)
    if form == "int8":
        largest = np.abs(block).max(axis=1, keepdims=True)
        usable = largest > 127 * np.finfo(np.float32).tiny  # others round to zeros
        scale = np.where(usable, largest / 127, 1).astype(np.float32)
        scales[at] = scale.reshape(-1, PANEL)
        whole = np.rint(block / scale).astype(np.int16) + 128
        return _interleaved(whole.astype(np.uint8), 4)
    grouped = block.reshape(len(block), -1, NIBBLES)
    scale = _scales_of_four_bits(grouped)
    bits = to_bf16(scale)
    scales[at] = bits.reshape(-1, PANEL, grouped.shape[1]).transpose(0, 2, 1)
    scale = from_bf16(bits)
    whole = np.clip(np.rint(grouped / scale[..., None]), -8, 7).astype(np.int8) + 8
    eights = whole.astype(np.uint8).reshape(len(block), -1, 2, 4)
    both = eights[:, :, 0] | (eights[:, :, 1] << 4)
    return _interleaved(both.reshape(len(block), -1), 4)


def _scales_of_four_bits(grouped: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale of each group (n, groups, 32) that rounds it with the least squared error.

    The largest number takes -8, as in llama.cpp's Q4_0, or a little less: some scales are tried.
    """
    index = np.abs(grouped).argmax(axis=2)[..., None]
    extreme = np.take_along_axis(grouped, index, axis=2)[..., 0]
    best = np.where(extreme != 0, extreme / -8, 1).astype(np.float32)
    least = np.full(best.shape, np.inf, np.float32)
    begin = best
    for factor in (1.0, 0.92, 0.85, 1.08, 8 / 7):
        scale = from_bf16(to_bf16(begin * np.float32(factor)))
        scale = np.where(scale == 0, 1, scale).astype(np.float32)
        rounded = np.clip(np.rint(grouped / scale[..., None]), -8, 7) * scale[..., None]
        error = ((rounded - grouped) ** 2).sum(axis=2)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best


def _interleaved(block: NDArray[Any], n: int) -> NDArray[Any]:
    """Rows (64 p, K) -> (p, K/n, 64, n)."""
    panels = block.reshape(-1, PANEL, block.shape[1] // n, n)
    return panels.transpose(0, 2, 1, 3)


def unpack(panels: Panels) -> NDArray[np.float32]:
    """Return the matrix (rows, width) that the panels stand for."""
    w, form = panels.weights, panels.form
    n = 1 if form == "fp32" else w.shape[3]
    flat = w.reshape(w.shape[0], w.shape[1], PANEL, n).transpose(0, 2, 1, 3)
    rows = flat.reshape(len(w) * PANEL, -1)
    if form == "bf16":
        values = from_bf16(rows)
    elif form == "int8":
        values = (rows.astype(np.float32) - 128) * panels.scales.reshape(-1, 1)
    elif form == "int4":
        fours = rows.reshape(len(rows), -1, 1, 4)
        eights = np.concatenate([fours & 15, fours >> 4], axis=2).astype(np.float32) - 8
        scale = from_bf16(panels.scales.transpose(0, 2, 1).reshape(len(rows), -1, 1))
        values = (eights.reshape(len(rows), -1, NIBBLES) * scale).reshape(len(rows), -1)
    else:
        values = rows
    return np.ascontiguousarray(values[: panels.rows, : panels.width], np.float32)


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round float32 to bf16, to nearest even; return the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the float32 of bf16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
