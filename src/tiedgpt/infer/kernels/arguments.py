"""The arguments of kernels. Callers and kernels import this; Numba is not imported here."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LANES = 16
"""Numbers of a vector register."""
BLOCK = 64
"""Positions whose attention scores are computed together; a cache holds a multiple of it."""
QUERIES = 4
"""Queries of one sequence that read keys and values together."""
VECTORS = 6
"""Vectors that a panel of weights is multiplied with at a time, at the most."""
GELU_NEW, GELU, RELU, SILU = range(4)
ACTIVATIONS = {"gelu_new": GELU_NEW, "gelu": GELU, "relu": RELU, "silu": SILU}
LINE = 8
"""The int64 of a cache line: counters lie that far apart."""
SMALLEST, LARGEST = float.fromhex("0x1p-126"), float.fromhex("0x1.fffffep127")
"""The smallest normal and the largest float32."""
ROUNDING = 1e-12
"""Share of a sum of float64 masses that its rounding may take: a sum so near reaches its target."""
SUM_BLOCK = 256
"""Tokens whose masses are summed together when one is drawn."""


class Control(NamedTuple):
    """The state of a step that its threads share, as one of them sees it."""

    counters: Any
    """A line for the step; for each phase, one of the chunks done and one of each share's claimed.
    """
    threads: Any
    me: Any
    """The number of this thread."""


class Matrix(NamedTuple):
    """A packed matrix and the biases of its rows. A stack has an axis of layers in front."""

    weights: Any
    scales: Any
    bias: Any


class Vectors(NamedTuple):
    """The vectors that a GEMM reads: (n, K) float32, bf16 as uint16, or int8; see `quantize.py`."""

    values: Any
    scales: Any
    """(n, K/64), float32, of int8."""
    sums: Any
    """(n, K/32), int32, of int8."""


class Activated(NamedTuple):
    """Where a GEMM writes its output after an activation function."""

    vectors: Vectors
    activation: Any


class Weights(NamedTuple):
    """All weights of a model."""

    wte: Matrix
    wpe: Any
    """(C, K), float32."""
    head: Matrix
    """The same arrays as `wte` in a tied model."""
    c_attn: Matrix
    attn_proj: Matrix
    c_fc: Matrix
    mlp_proj: Matrix
    norms: Any
    """(L, 2, 2, D): ln_1 and ln_2 of each layer, the weight and bias of each."""
    ln_f: Any
    """(2, D)."""
    windows: Any
    """(L,): the positions that a layer attends to; 0 is all."""
    epsilon: Any
    n_embd: int
    n_head: int
    post: bool
    activation: int


class Buffers(NamedTuple):
    """The activations of as many tokens as a batch may have."""

    h: Any
    """(tokens, K), the residual stream."""
    x: Vectors
    """The input of the next GEMM."""
    qkv: Any
    attention: Any
    mlp: Vectors
    states: Any
    """(outputs, K): the last norm's output at the tokens whose logits are asked for."""
    logits: Any
    """(outputs, rows of the head)."""
    normed: Any
    """(threads, K): this and the following are scratch of each thread."""
    sums: Any
    """(threads, VECTORS, PANEL)."""
    widened: Any
    """(threads, (PANEL + VECTORS) x K), int16: a panel of int8 weights, then 6 vectors."""
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


class HeadCache(Cache):
    """One head of one slot: keys (C/64, D/H, 64), values (C, D/H), scales (C,) or empty."""


class Queries(NamedTuple):
    """The queries of one head at n (1 or QUERIES) neighbouring positions of a sequence.

    They are rows of `rows` (tokens, columns) from row `first` on, and `size` (D/H) columns of them
    from `column` on. The first query is at `position`. Each attends to `window` positions; 0: all.
    """

    rows: Any
    first: Any
    n: Any
    column: Any
    size: Any
    position: Any
    window: Any


class Batch(NamedTuple):
    """The tokens that one step reads, of several sequences one after the other."""

    ids: Any
    positions: Any
    slot_ids: Any
    """(n,): the slot of each sequence."""
    spans: Any
    """(n, 2): the first and the last token + 1 of each sequence."""
    outputs: Any
    """The tokens whose logits are asked for."""


class TokenLists(NamedTuple):
    """The ids of prompts and texts, of biases, and those that XTC spares; see `SamplingRow`."""

    seen: Any
    bias_ids: Any
    spared: Any
    bias: Any


class Record:
    """Flattened arguments of many steps; the arrays must keep their addresses."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.words, self.kinds = arguments, list[int](), list[Any]()
        flatten(arguments, self.words, self.kinds)


def flatten(values: tuple[Any, ...], words: list[int], kinds: list[Any]) -> None:
    """Append the arguments' words, which `fields.py` reads, and their types.

    The words of an array are its address and its shape. Its type is its dtype and its number of
    dimensions; a scalar's is its class.
    """
    for value in values:
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise ValueError(
                    f"kernels take contiguous arrays only, got strides {value.strides}"
                )
            words.append(value.ctypes.data)
            words += value.shape
            kinds += (value.dtype, value.ndim)
        elif isinstance(value, Record):
            words += value.words
            kinds += value.kinds
        elif isinstance(value, tuple):
            flatten(value, words, kinds)
        else:
            words.append(int(value.view(np.int32) if isinstance(value, np.float32) else value))
            kinds.append(type(value))


def example(value: Any) -> Any:
    """Return a small argument of the same type, by Numba's `typeof`, as this one."""
    if isinstance(value, Record):
        value = value.arguments
    if isinstance(value, np.ndarray):
        return np.empty((0,) * value.ndim, value.dtype)
    if isinstance(value, tuple):
        items = map(example, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
