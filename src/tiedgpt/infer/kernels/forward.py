"""A whole step in one compiled call: ids in, logits out, the KV cache appended to.

Every thread runs `forward` on the same arrays; the work is shared in phases (`work_stealing.py`). h
is the residual stream, as in `core/model.py`, of which this is the transcription:

    h_0 = U W_e + W_p;    h += attention(norm(h));    h += MLP(norm(h));    logits = norm(h_L) W_e^T
"""

from __future__ import annotations

from numba import njit

from tiedgpt.infer.kernels.arguments import QUERIES
from tiedgpt.infer.kernels.attention import append, attend
from tiedgpt.infer.kernels.gemm import activated_gemm, gemm
from tiedgpt.infer.kernels.microkernels import PANEL, number_at
from tiedgpt.infer.kernels.norms import layer_norm
from tiedgpt.infer.kernels.quantize import quantize
from tiedgpt.infer.kernels.work_stealing import claimed, end, is_over

PLAIN, NORM, REPLACE = range(3)
"""What is read: h, norm(h), or norm(h) that takes the place of h."""


@njit(error_model="numpy")
def _embed(control, phase, model, buffers, batch):
    """Set h_0 = U W_e + W_p."""
    n, width = len(batch.ids), model.n_embd
    for m in claimed(control, phase, n):
        h = buffers.h[m]
        token, position = batch.ids[m], model.wpe[batch.positions[m]]
        panel, row = token // PANEL, token % PANEL
        for k in range(width):
            h[k] = number_at(model.wte.weights, model.wte.scales, panel, row, k) + position[k]
    return phase + 1


@njit(error_model="numpy")
def _layer(control, phase, layer, model, buffers, cache, batch):
    n, padded, post = len(batch.ids), buffers.h.shape[1], model.post
    x, xs, xsum = buffers.x, buffers.x_scales, buffers.x_sums
    norms = model.norms
    if post:
        before = norms[layer - 1, 1] if layer else norms[0, 1]
        doing = int(REPLACE) if layer else int(PLAIN)
        phase = _normed(control, phase, model, buffers, before, n, doing)
    else:
        phase = _normed(control, phase, model, buffers, norms[layer, 0], n, int(NORM))
    w = model.c_attn
    phase = gemm(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], x, xs, xsum, n, padded,
        False, buffers.sums[control.me], buffers.qkv,
    )  # fmt: skip
    phase = _attention(control, phase, layer, model, buffers, cache, batch)
    for token in claimed(control, phase, n):
        quantize(buffers.attention[token], padded, x[token], xs[token], xsum[token])
    phase += 1
    w = model.attn_proj
    phase = gemm(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], x, xs, xsum, n, padded,
        True, buffers.sums[control.me], buffers.h,
    )  # fmt: skip
    if post:
        phase = _normed(control, phase, model, buffers, norms[layer, 0], n, int(REPLACE))
    else:
        phase = _normed(control, phase, model, buffers, norms[layer, 1], n, int(NORM))
    w = model.c_fc
    phase = activated_gemm(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], x, xs, xsum, n, padded,
        model.activation, buffers.sums[control.me], buffers.mlp, buffers.mlp_scales,
        buffers.mlp_sums,
    )  # fmt: skip
    w = model.mlp_proj
    return gemm(
        control, phase, w.weights[layer], w.scales[layer], w.bias[layer], buffers.mlp,
        buffers.mlp_scales, buffers.mlp_sums, n, buffers.mlp.shape[1], True,
        buffers.sums[control.me], buffers.h,
    )  # fmt: skip


@njit(error_model="numpy")
def _normed(control, phase, model, buffers, norm, n, doing):
    """Write norm(h) to x as GEMMs read it; with REPLACE to h as well (post-LN)."""
    padded = buffers.h.shape[1]
    out = buffers.normed[control.me]
    for m in claimed(control, phase, n):
        h = buffers.h[m]
        if doing > PLAIN:
            layer_norm(h, model.n_embd, norm[0], norm[1], model.epsilon, out)
            if doing == REPLACE:
                for k in range(padded):
                    h[k] = out[k]
        else:
            for k in range(model.n_embd):
                out[k] = h[k]
        quantize(out, padded, buffers.x[m], buffers.x_scales[m], buffers.x_sums[m])
    return phase + 1


@njit(error_model="numpy")
def _attention(control, phase, layer, model, buffers, cache, batch):
    """Append the new keys and values and attend from each new position; a chunk is a head."""
    heads, width = model.n_head, model.n_embd
    size, window = width // heads, model.windows[layer]
    chunks = batch.sequences.shape[0] * heads
    scaled = cache.key_scales.shape[3] > 0
    p, mixed = buffers.p[control.me], buffers.mixed[control.me]
    for chunk in claimed(control, phase, chunks):
        sequence, head = chunk // heads, chunk % heads
        begin, end = batch.sequences[sequence, 0], batch.sequences[sequence, 1]
        slot = batch.slots[begin]
        keys, values = cache.keys[layer, slot, head], cache.values[layer, slot, head]
        key_scales = cache.key_scales[layer, slot, head]
        value_scales = cache.value_scales[layer, slot, head]
        after = cache.keys[layer, slot, head + 1] if head + 1 < heads else keys
        at = head * size
        for m in range(begin, end):
            qkv, position = buffers.qkv[m], batch.positions[m]
            append(
                qkv[width + at :], qkv[2 * width + at :], size, position, keys, values, key_scales,
                value_scales, scaled,
            )  # fmt: skip
        m = begin
        while m < end:
            queries = QUERIES if end - m >= QUERIES else 1
            attend(
                buffers.qkv, m, queries, at, size, batch.positions[m], window, keys, values,
                key_scales, value_scales, scaled, after, p, mixed, buffers.attention,
            )  # fmt: skip
            m += queries
    return phase + 1


@njit(error_model="numpy")
def _logits(control, phase, model, buffers, batch):
    """Set logits = norm(h_L) W_e^T of the tokens asked for: the face of W that predicts."""
    n, padded = len(batch.outputs), buffers.h.shape[1]
    layers = model.windows.shape[0]
    for m in claimed(control, phase, n):
        h, out = buffers.h[batch.outputs[m]], buffers.states[m]
        norm = model.norms[layers - 1, 1] if model.post else model.ln_f
        layer_norm(h, model.n_embd, norm[0], norm[1], model.epsilon, out)
        quantize(out, padded, buffers.x[m], buffers.x_scales[m], buffers.x_sums[m])
    phase += 1
    w = model.head
    return gemm(
        control, phase, w.weights, w.scales, w.bias, buffers.x, buffers.x_scales, buffers.x_sums, n,
        padded, False, buffers.sums[control.me], buffers.logits,
    )  # fmt: skip


@njit(error_model="numpy")
def forward(control, model, buffers, cache, batch):
    """Do a step. A thread that comes when all chunks are claimed writes only to its own control."""
    if not is_over(control):
        phase = _embed(control, 0, model, buffers, batch)
        for layer in range(model.windows.shape[0]):
            phase = _layer(control, phase, layer, model, buffers, cache, batch)
        _logits(control, phase, model, buffers, batch)
        end(control)
