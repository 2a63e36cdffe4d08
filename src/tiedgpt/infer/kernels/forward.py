"""A whole step in one compiled call: ids in, scores out, keys and values kept.

Every thread runs `forward` on the same arrays; the work is shared in phases (`queue.py`). h is the
residual stream, as in `core/model.py`, of which this is the transcription:

    h_0 = U W_e + W_p;    h += attention(norm(h));    h += MLP(norm(h));    scores = norm(h_L) W_e^T
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tiedgpt.infer.kernels.arithmetic import normalise, prepare
from tiedgpt.infer.kernels.attention import TOGETHER, attend, keep, keep_value
from tiedgpt.infer.kernels.product import activated_product, product
from tiedgpt.infer.kernels.queue import end, finish, is_over, take
from tiedgpt.infer.kernels.rows import read_row

PHASES_A_LAYER, PHASES_BESIDE = 8, 3
PLAIN, NORM, KEEP = range(3)
"""What is read: h, norm(h), or norm(h) that takes the place of h."""


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
    """Room for the activations of as many tokens as a call may bring."""

    h: Any
    x: Any
    x_scales: Any
    x_sums: Any
    qkv: Any
    mixed: Any
    y: Any
    y_scales: Any
    y_sums: Any
    states: Any
    """(tokens, K): after the last norm, of the tokens that are scored."""
    scores: Any
    """(tokens, rows of the head)."""


class Cache(NamedTuple):
    """Keys (L, S, H, C/64, D/H, 64) and values (L, S, H, C, D/H), with scales where int8."""

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


class Call(NamedTuple):
    """What one call reads: tokens of several sequences, one after the other."""

    ids: Any
    slots: Any
    positions: Any
    runs: Any
    """(n, 2): first and last + 1 token of each sequence."""
    wanted: Any
    """Tokens whose scores are asked for."""


@njit(error_model="numpy")
def _embed(control, phase, model, buffers, call):
    """Set h_0 = U W_e + W_p."""
    n, width, mine = len(call.ids), model.n_embd, 0
    while True:
        m = take(control, phase, n)
        if m < 0:
            break
        mine += 1
        h = buffers.h[m]
        read_row(model.wte.weights, model.wte.scales, call.ids[m], width, h)
        position = model.wpe[call.positions[m]]
        for k in range(width):
            h[k] += position[k]
    return finish(control, phase, mine, n)


@njit(error_model="numpy")
def _layer(control, phase, layer, model, buffers, cache, call):
    n, padded, post = len(call.ids), buffers.h.shape[1], model.post
    x, xs, xsum = buffers.x, buffers.x_scales, buffers.x_sums
    norms = model.norms
    if post:
        before = norms[layer - 1, 1] if layer else norms[0, 1]
        doing = int(KEEP) if layer else int(PLAIN)
        phase = _normed(control, phase, model, buffers, before, n, doing)
    else:
        phase = _normed(control, phase, model, buffers, norms[layer, 0], n, int(NORM))
    w = model.c_attn
    phase = product(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], x, xs, xsum, n, padded,
        False, buffers.qkv,
    )  # fmt: skip
    phase = _attention(control, phase, layer, model, buffers, cache, call)
    mine = 0
    while True:
        token = take(control, phase, n)
        if token < 0:
            break
        mine += 1
        prepare(buffers.mixed[token], padded, x[token], xs[token], xsum[token])
    phase = finish(control, phase, mine, n)
    w = model.attn_proj
    phase = product(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], x, xs, xsum, n, padded,
        True, buffers.h,
    )  # fmt: skip
    if post:
        phase = _normed(control, phase, model, buffers, norms[layer, 0], n, int(KEEP))
    else:
        phase = _normed(control, phase, model, buffers, norms[layer, 1], n, int(NORM))
    w = model.c_fc
    phase = activated_product(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], x, xs, xsum, n, padded,
        model.activation, buffers.y, buffers.y_scales, buffers.y_sums,
    )  # fmt: skip
    w = model.mlp_proj
    return product(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], buffers.y,
        buffers.y_scales, buffers.y_sums, n, buffers.y.shape[1], True, buffers.h,
    )  # fmt: skip


@njit(error_model="numpy")
def _normed(control, phase, model, buffers, norm, n, doing):
    """Write norm(h) to x as products read it; with NORM and KEEP to h as well (post-LN)."""
    padded, mine = buffers.h.shape[1], 0
    out = np.zeros(padded, np.float32)
    while True:
        m = take(control, phase, n)
        if m < 0:
            break
        mine += 1
        h = buffers.h[m]
        if doing > PLAIN:
            normalise(h, model.n_embd, norm[0], norm[1], model.epsilon, out)
            if doing == KEEP:
                for k in range(padded):
                    h[k] = out[k]
        else:
            for k in range(model.n_embd):
                out[k] = h[k]
        prepare(out, padded, buffers.x[m], buffers.x_scales[m], buffers.x_sums[m])
    return finish(control, phase, mine, n)


@njit(error_model="numpy")
def _attention(control, phase, layer, model, buffers, cache, call):
    """Keep the new keys and values and attend from each new position; a chunk is a head."""
    heads, width = model.n_head, model.n_embd
    size, window, mine = width // heads, model.windows[layer], 0
    chunks = call.runs.shape[0] * heads
    scaled = cache.key_scales.shape[3] > 0
    p = np.empty((TOGETHER, cache.values.shape[3]), np.float32)
    mixed = np.empty((TOGETHER, cache.values.shape[4]), np.float32)
    while True:
        chunk = take(control, phase, chunks)
        if chunk < 0:
            break
        mine += 1
        run, head = chunk // heads, chunk % heads
        begin, end = call.runs[run, 0], call.runs[run, 1]
        slot = call.slots[begin]
        keys, values = cache.keys[layer, slot, head], cache.values[layer, slot, head]
        key_scales = cache.key_scales[layer, slot, head]
        value_scales = cache.value_scales[layer, slot, head]
        after = cache.keys[layer, slot, head + 1] if head + 1 < heads else keys
        at = head * size
        for m in range(begin, end):
            qkv, position = buffers.qkv[m], call.positions[m]
            keep(qkv[width + at :], size, position, keys, key_scales)
            keep_value(qkv[2 * width + at :], size, position, values, value_scales)
        m = begin
        while m < end:
            together = TOGETHER if end - m >= TOGETHER else 1
            attend(
                buffers.qkv, m, together, at, size, call.positions[m], window, keys, values,
                key_scales, value_scales, scaled, after, p, mixed, buffers.mixed,
            )  # fmt: skip
            m += together
    return finish(control, phase, mine, chunks)


@njit(error_model="numpy")
def _score(control, phase, model, buffers, call):
    """Set scores = norm(h_L) W_e^T, of the tokens that are wanted: the face of W that predicts."""
    n, padded, mine = len(call.wanted), buffers.h.shape[1], 0
    layers = model.windows.shape[0]
    while True:
        m = take(control, phase, n)
        if m < 0:
            break
        mine += 1
        h, out = buffers.h[call.wanted[m]], buffers.states[m]
        norm = model.norms[layers - 1, 1] if model.post else model.ln_f
        normalise(h, model.n_embd, norm[0], norm[1], model.epsilon, out)
        prepare(out, padded, buffers.x[m], buffers.x_scales[m], buffers.x_sums[m])
    phase = finish(control, phase, mine, n)
    w = model.head
    return product(
        control, phase, w.weights, w.scales, w.bias, buffers.x, buffers.x_scales, buffers.x_sums, n,
        padded, False, buffers.scores,
    )  # fmt: skip


def phases_of(n_layer: int) -> int:
    """Return how many phases a step has."""
    return PHASES_A_LAYER * n_layer + PHASES_BESIDE


def _compiled(kernels: int):
    """Return `forward`, compiled at its first call and kept on disk.

    Numba asks only whether this file has changed since; the digest of all kernels' files, which the
    function encloses, has it ask for them all.
    """

    def forward(control, model, buffers, cache, call):
        if not is_over(control) and kernels:
            phase = _embed(control, 0, model, buffers, call)
            for layer in range(model.windows.shape[0]):
                phase = _layer(control, phase, layer, model, buffers, cache, call)
            _score(control, phase, model, buffers, call)
            end(control)

    forward.__qualname__ = f"forward_{kernels:x}"  # names the file that is kept
    compiler = partial(njit, nogil=True, error_model="numpy")
    try:
        return compiler(cache=True)(forward)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return compiler()(forward)


def _digest() -> int:
    files = sorted(set(Path(__file__).parent.glob("*.py")) - {Path(__file__).with_name("crew.py")})
    return 1 + zlib.crc32(b"".join(file.read_bytes() for file in files))


forward = _compiled(_digest())
"""Take part in a step (control, Weights, Buffers, Cache, Call), on any thread.

Returns when the step is done, or at once if it already is. A thread that comes when all chunks are
taken writes nothing but to the step's own control.
"""
