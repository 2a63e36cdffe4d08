"""Operations on vectors between matmuls: LayerNorm and activation functions."""

from __future__ import annotations

import math

import numpy as np

from tiedgpt.infer.kernels import vectors as vec
from tiedgpt.infer.kernels.arguments import GELU, GELU_NEW, LANES, RELU
from tiedgpt.infer.kernels.simd import jit


@jit
def activate(x, n, activation):
    """Apply an activation to the first n of x, a multiple of 16, in place."""
    if activation == GELU:
        half, root = np.float32(0.5), np.float32(0.7071067811865476)
        for i in range(n):
            x[i] = half * x[i] * (np.float32(1.0) + np.float32(math.erf(x[i] * root)))
    elif activation == RELU:
        for i in range(n):
            x[i] = max(x[i], np.float32(0.0))
    else:  # x / (1 + e^-y), where y is x (SiLU) or 2 sqrt(2 / pi) (x + 0.044715 x^3)
        one, cubic = vec.splat(np.float32(1.0)), vec.splat(np.float32(0.044715))
        factor = np.float32(-2 * 0.7978845608028654 if activation == GELU_NEW else -1.0)
        for at in range(0, n, LANES):
            y = v = vec.load(x, at)
            if activation == GELU_NEW:
                y = vec.add(v, vec.multiply(vec.multiply(v, cubic), vec.multiply(v, v)))
            e = vec.exp(vec.shift(y, np.float32(0.0), factor))
            vec.store(x, at, vec.divide(v, vec.add(one, e)))


@jit
def layer_norm(x, width, weight, bias, epsilon, out):
    """LayerNorm of the first `width` of x into `out`, zeros behind, to the next multiple of 16.

    x has zeros there, too. Sums are over 16 lanes, then across them: always in the same order.
    """
    total = vec.splat(np.float32(0.0))
    for at in range(0, width, LANES):
        total = vec.add(total, vec.load(x, at))
    mean = vec.total(total) / np.float32(width)
    for i in range(width):
        out[i] = x[i] - mean
    for i in range(width, -(-width // LANES) * LANES):
        out[i] = np.float32(0.0)
    squares = vec.splat(np.float32(0.0))
    for at in range(0, width, LANES):
        d = vec.load(out, at)
        squares = vec.add(squares, vec.multiply(d, d))
    scale = np.float32(1.0 / math.sqrt(vec.total(squares) / np.float32(width) + epsilon))
    for i in range(width):
        out[i] = out[i] * scale * weight[i] + bias[i]
