"""ggml's Q8_0: every 32 numbers of a row are 32 signed bytes and one float16 scale, 34 bytes.

Bit for bit what `quantize_row_q8_0_ref` of ggml-quants.c makes: scale = largest / 127, numbers
rounded half away from zero. `stored.decode` is the way back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.weights.tensors import Q8_BLOCK

BLOCK = 32
BLOCK_BYTES = Q8_BLOCK.itemsize


def quantize(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(N, D) float32, D a multiple of 32, all finite -> (N, D / 32 * 34) bytes."""
    blocks = rows.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    inverse[~np.isfinite(inverse)] = 0  # nothing, or too small for a float16 scale: zeros
    numbers: NDArray[Any] = blocks * inverse
    magnitudes = np.abs(numbers)
    whole = np.floor(magnitudes)
    magnitudes -= whole
    magnitudes *= 2
    whole += np.floor(magnitudes, out=magnitudes)
    stored = np.empty(len(blocks), Q8_BLOCK)
    with np.errstate(over="ignore"):
        stored["scale"] = scales[:, 0]
    stored["values"] = np.copysign(whole, numbers, out=numbers)
    return stored.view(np.uint8).reshape(len(rows), -1)
