"""What happens to vectors between matmuls: LayerNorm and activation functions."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tiedgpt.infer.kernels.arguments import GELU, GELU_NEW, LANES, RELU
from tiedgpt.infer.kernels.vectors import (
    add16,
    filled16,
    load16,
    nearest,
    power_of_two,
    scale16,
    total16,
)  # fmt: skip

LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
FAST = {"contract", "reassoc", "nsz", "arcp"}


@njit(inline="always", fastmath={"contract"}, error_model="numpy")
def exp(x):
    """Return e^x in float32, within 2 units in the last place (Cephes' expf), without a branch."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = nearest(x * LOG2E)
    r = x - n * LN2_HIGH - n * LN2_LOW
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * power_of_two(n)


@njit(fastmath=FAST, error_model="numpy")
def activate(x, n, kind):
    """Apply an activation to the first n of x, in place."""
    one, half = np.float32(1.0), np.float32(0.5)
    if kind == GELU_NEW:
        a, b = np.float32(-2 * 0.7978845608028654), np.float32(0.044715)
        for i in range(n):
            v = x[i]
            x[i] = v / (one + exp(a * (v + b * v * v * v)))
    elif kind == GELU:
        for i in range(n):
            x[i] = half * x[i] * (one + np.float32(math.erf(x[i] * np.float32(0.7071067811865476))))
    elif kind == RELU:
        for i in range(n):
            x[i] = max(x[i], np.float32(0.0))
    else:
        for i in range(n):
            x[i] = x[i] / (one + exp(-x[i]))


@njit(error_model="numpy")
def layer_norm(x, width, weight, bias, epsilon, out):
    """LayerNorm of the first `width` of x into `out`, zeros behind, to the next multiple of 16.

    x has zeros there, too. Sums are over 16 lanes, then across them: always in the same order.
    """
    total = filled16(np.float32(0.0))
    for at in range(0, width, LANES):
        total = add16(total, load16(x, at))
    mean = total16(total) / np.float32(width)
    for i in range(width):
        out[i] = x[i] - mean
    for i in range(width, -(-width // LANES) * LANES):
        out[i] = np.float32(0.0)
    squares = filled16(np.float32(0.0))
    for at in range(0, width, LANES):
        d = load16(out, at)
        squares = add16(squares, scale16(d, d))
    scale = np.float32(1.0 / math.sqrt(total16(squares) / np.float32(width) + epsilon))
    for i in range(width):
        out[i] = out[i] * scale * weight[i] + bias[i]
