"""A whole step in one compiled call: ids in, logits out, the KV cache appended to.

Every thread runs `forward` on the same arrays; the work is shared in phases (`work_stealing.py`). h
is the residual stream, as in `core/model.py`, of which this is the transcription:

    h_0 = U W_e + W_p;    h += attention(norm(h));    h += MLP(norm(h));    logits = norm(h_L) W_e^T
"""

from __future__ import annotations

from tiedgpt.infer.kernels.arguments import QUERIES, Activated, HeadCache, Matrix, Queries
from tiedgpt.infer.kernels.attention import append, attend
from tiedgpt.infer.kernels.gemm import accumulate, gemm, store, store_activated
from tiedgpt.infer.kernels.microkernels import PANEL, number_at
from tiedgpt.infer.kernels.norms import layer_norm
from tiedgpt.infer.kernels.quantize import quantize, row_of
from tiedgpt.infer.kernels.simd import jit
from tiedgpt.infer.kernels.work_stealing import claim_chunks, end, is_over

UNCHANGED, NORM, REPLACE = range(3)
"""The next GEMM reads h, norm(h), or norm(h) that also takes the place of h."""


@jit
def _embed(control, phase, model, buffers, batch):
    """Set h_0 = U W_e + W_p."""
    n, width, wte = len(batch.ids), model.n_embd, _matrix(model.wte)
    for m in claim_chunks(control, phase, n):
        h = buffers.h[m]
        token, position = batch.ids[m], model.wpe[batch.positions[m]]
        panel, row = token // PANEL, token % PANEL
        for k in range(width):
            h[k] = number_at(wte.weights, wte.scales, panel, row, k) + position[k]
    return phase + 1


@jit(inline="always")
def _layer_of(stack, layer):
    """Return the matrix of one layer."""
    return Matrix(stack.weights[layer], stack.scales[layer], stack.bias[layer])


@jit(inline="always")
def _matrix(fields):
    """Return a matrix by value, as `_layer_of` does: for one type a function is compiled once."""
    return Matrix(fields.weights, fields.scales, fields.bias)


@jit(inline="always")
def _layer(control, phase, layer, model, buffers, cache, batch):
    """Add attention and the MLP of one layer to h."""
    n, post, norms = len(batch.ids), model.post, model.norms
    x = buffers.x
    if post:
        before = norms[layer - 1, 1] if layer else norms[0, 1]
        mode = int(REPLACE) if layer else int(UNCHANGED)
        phase = _normalize(control, phase, model, buffers, before, n, mode)
    else:
        phase = _normalize(control, phase, model, buffers, norms[layer, 0], n, int(NORM))
    c_attn = _layer_of(model.c_attn, layer)
    phase = gemm(control, phase, c_attn, x, n, buffers, store, buffers.qkv)
    phase = _attention(control, phase, layer, model, buffers, cache, batch)
    for token in claim_chunks(control, phase, n):
        quantize(buffers.attention[token], 0, x.values.shape[1], row_of(x, token))
    attn_proj = _layer_of(model.attn_proj, layer)
    phase = gemm(control, phase + 1, attn_proj, x, n, buffers, accumulate, buffers.h)
    if post:
        phase = _normalize(control, phase, model, buffers, norms[layer, 0], n, int(REPLACE))
    else:
        phase = _normalize(control, phase, model, buffers, norms[layer, 1], n, int(NORM))
    hidden = Activated(buffers.mlp, model.activation)
    c_fc, mlp_proj = _layer_of(model.c_fc, layer), _layer_of(model.mlp_proj, layer)
    phase = gemm(control, phase, c_fc, x, n, buffers, store_activated, hidden)
    return gemm(control, phase, mlp_proj, buffers.mlp, n, buffers, accumulate, buffers.h)


@jit
def _normalize(control, phase, model, buffers, norm, n, mode):
    """Write norm(h) to x as GEMMs read it; with REPLACE to h as well (post-LN)."""
    padded = buffers.h.shape[1]
    out = buffers.normed[control.me]
    for m in claim_chunks(control, phase, n):
        h = buffers.h[m]
        if mode > UNCHANGED:
            layer_norm(h, model.n_embd, norm[0], norm[1], model.epsilon, out)
            if mode == REPLACE:
                for k in range(padded):
                    h[k] = out[k]
        else:
            for k in range(model.n_embd):
                out[k] = h[k]
        quantize(out, 0, padded, row_of(buffers.x, m))
    return phase + 1


@jit
def _attention(control, phase, layer, model, buffers, cache, batch):
    """Append the new keys and values and attend from each new position; a chunk is a head."""
    heads, width = model.n_head, model.n_embd
    size, window = width // heads, model.windows[layer]
    chunks = len(batch.slot_ids) * heads
    p, mixed = buffers.p[control.me], buffers.mixed[control.me]
    for chunk in claim_chunks(control, phase, chunks):
        sequence, head = chunk // heads, chunk % heads
        slot_id = batch.slot_ids[sequence]
        m, end = batch.spans[sequence, 0], batch.spans[sequence, 1]
        its = HeadCache(
            cache.keys[layer, slot_id, head],
            cache.values[layer, slot_id, head],
            cache.key_scales[layer, slot_id, head],
            cache.value_scales[layer, slot_id, head],
        )
        next_keys = cache.keys[layer, slot_id, head + 1] if head + 1 < heads else its.keys
        column = head * size
        for token in range(m, end):
            qkv = buffers.qkv[token]
            key, value = qkv[width + column :], qkv[2 * width + column :]
            append(key, value, size, batch.positions[token], its)
        while m < end:
            n = QUERIES if end - m >= QUERIES else 1
            queries = Queries(buffers.qkv, m, n, column, size, batch.positions[m], window)
            attend(queries, its, next_keys, p, mixed, buffers.attention)
            m += n
    return phase + 1


@jit(inline="always")
def _logits(control, phase, model, buffers, batch):
    """Set logits = norm(h_L) W_e^T of the tokens asked for: the side of W that predicts."""
    n, padded = len(batch.outputs), buffers.h.shape[1]
    layers = model.windows.shape[0]
    for m in claim_chunks(control, phase, n):
        h, out = buffers.h[batch.outputs[m]], buffers.states[m]
        norm = model.norms[layers - 1, 1] if model.post else model.ln_f
        layer_norm(h, model.n_embd, norm[0], norm[1], model.epsilon, out)
        quantize(out, 0, padded, row_of(buffers.x, m))
    head = _matrix(model.head)
    return gemm(control, phase + 1, head, buffers.x, n, buffers, store, buffers.logits)


@jit
def forward(control, model, buffers, cache, batch):
    """Do a step. A thread that comes when all chunks are claimed writes only to its own control."""
    if not is_over(control):
        phase = _embed(control, 0, model, buffers, batch)
        for layer in range(model.windows.shape[0]):
            phase = _layer(control, phase, layer, model, buffers, cache, batch)
        _logits(control, phase, model, buffers, batch)
        end(control)
