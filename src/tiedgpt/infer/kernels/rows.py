"""The face of W that reads: a token's row, taken out of its panel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from tiedgpt.infer.kernels.tiles import PANEL
from tiedgpt.infer.kernels.vectors import float_of_bits


def read_row(weights: Any, scales: Any, token: int, width: int, out: Any) -> None:
    """Write the row of a token, in float32: the face of W that reads."""


@overload(read_row, inline="always")
def _read_row(weights, scales, token, width, out):
    if weights.dtype == types.float32:

        def plain(weights, scales, token, width, out):
            panel, row = token // PANEL, token % PANEL
            for k in range(width):
                out[k] = weights[panel, k, row]

        return plain
    if weights.dtype == types.uint16:

        def pairs(weights, scales, token, width, out):
            panel, row = token // PANEL, token % PANEL
            for k in range(width):
                out[k] = float_of_bits(np.int32(weights[panel, k // 2, row, k % 2]) << 16)

        return pairs
    if scales.ndim == 3:

        def nibbles(weights, scales, token, width, out):
            panel, row = token // PANEL, token % PANEL
            for k in range(width):
                both = np.int32(weights[panel, k // 8, row, k % 4])
                whole = (both >> 4 if k % 8 >= 4 else both & 15) - 8
                scale = float_of_bits(np.int32(scales[panel, k // 32, row]) << 16)
                out[k] = np.float32(whole) * scale

        return nibbles

    def whole_bytes(weights, scales, token, width, out):
        panel, row = token // PANEL, token % PANEL
        for k in range(width):
            whole = np.int32(weights[panel, k // 4, row, k % 4]) - 128
            out[k] = np.float32(whole) * scales[panel, row]

    return whole_bytes
