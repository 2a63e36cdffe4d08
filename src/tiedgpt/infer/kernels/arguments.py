"""The arguments of kernels. Callers and kernels import this; Numba is not imported here."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LANES = 16
"""Numbers of a vector."""
BLOCK = 64
"""Positions whose scores are computed together; room for positions is a multiple of it."""
QUERIES = 4
"""Queries of one sequence that read keys and values together."""
VECTORS = 6
"""Vectors that a panel of weights is multiplied with at a time, at the most."""
GELU_NEW, GELU, RELU, SILU = range(4)
ACTIVATIONS = {"gelu_new": GELU_NEW, "gelu": GELU, "relu": RELU, "silu": SILU}
PHASES_A_LAYER, PHASES_BESIDE = 8, 3
LINE = 8
"""Counters lie as many int64 apart: a cache line."""


class Control(NamedTuple):
    """What the threads share a step by, as one of them sees it."""

    counters: Any
    """A line for the step, then for each phase one of chunks done, and one of each share's claimed.
    """
    threads: Any
    me: Any
    """Which of them this one is."""


def control_for(phases: int, threads: int) -> Control:
    """Return what threads share a step of so many phases by; each step takes a new one."""
    lines = 1 + phases * (1 + threads)
    counters: NDArray[np.int64] = np.zeros(lines * LINE, np.int64)
    return Control(counters, threads, 0)


def phases_of(n_layer: int) -> int:
    """Return how many phases a step of `forward` has."""
    return PHASES_A_LAYER * n_layer + PHASES_BESIDE


class Matrix(NamedTuple):
    """A packed matrix and the biases of its rows, padded as they are; layers stacked in front."""

    weights: Any
    scales: Any
    bias: Any


class Weights(NamedTuple):
    """All of a model."""

    wte: Matrix
    wpe: Any
    """(C, K), float32."""
    head: Matrix
    """Of a tied model: the same arrays as `wte`."""
    c_attn: Matrix
    attn_proj: Matrix
    c_fc: Matrix
    mlp_proj: Matrix
    norms: Any
    """(L, 2, 2, D): of each layer ln_1 and ln_2, of each weight and bias."""
    ln_f: Any
    """(2, D)."""
    windows: Any
    """(L,): positions that a layer sees back; 0: all."""
    epsilon: Any
    n_embd: int
    n_head: int
    post: bool
    activation: int


class Buffers(NamedTuple):
    """Room for the activations of as many tokens as a batch may bring."""

    h: Any
    x: Any
    x_scales: Any
    x_sums: Any
    qkv: Any
    attention: Any
    mlp: Any
    mlp_scales: Any
    mlp_sums: Any
    states: Any
    """(tokens, K): after the last norm, of the tokens whose logits are asked for."""
    logits: Any
    """(tokens, rows of the head)."""
    normed: Any
    """(threads, K): this and the following are scratch of each thread."""
    sums: Any
    """(threads, VECTORS, PANEL)."""
    p: Any
    """(threads, QUERIES, C)."""
    mixed: Any
    """(threads, QUERIES, D/H)."""


class Cache(NamedTuple):
    """Keys (L, S, H, C/64, D/H, 64) and values (L, S, H, C, D/H), with scales where int8."""

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


class Batch(NamedTuple):
    """What one step reads: tokens of several sequences, one after the other."""

    ids: Any
    slots: Any
    positions: Any
    sequences: Any
    """(n, 2): first and last + 1 token of each sequence."""
    outputs: Any
    """Tokens whose logits are asked for."""
