"""Sequences in slots on the CPU kernels: the `Session` that needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.infer.kernels import sampling
from tiedgpt.infer.kernels.arguments import (
    ACTIVATIONS,
    BLOCK,
    QUERIES,
    VECTORS,
    Batch,
    Buffers,
    Cache,
    Matrix,
    Record,
    Vectors,
    Weights,
)
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.infer.kernels.thread_pool import ThreadPool
from tiedgpt.infer.sampling import NextToken, SamplingInput
from tiedgpt.infer.session import Logits, memory_error
from tiedgpt.runtime import count_cores
from tiedgpt.weights.formats.packed import PackedModel
from tiedgpt.weights.formats.packed.panels import PANEL, padded

MAX_DEFAULT_THREADS = 16
"""More threads do not help when one token is read at a time: memory is the limit."""
ACTIVATION_DTYPES = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8, "int4": np.int8}
"""By precision, the dtype of activations and of the KV cache."""

forward = Kernel("tiedgpt.infer.kernels.forward", "forward")


class PackedRunner:
    """A packed model, ready to read."""

    def __init__(self, model: PackedModel, *, threads: int | None = None) -> None:
        self.threads = threads or min(MAX_DEFAULT_THREADS, count_cores())
        self.packed = model
        self.config = model.config
        self._weights = Record(_weights(model))

    def use_caller_threads(self) -> None:
        """Do nothing: kernels have their own threads."""

    def session(self, *, n_slots: int, capacity: int) -> PackedSession:
        """Allocate room for `n_slots` sequences of up to `capacity` positions; see `Runner`."""
        return PackedSession(self.packed, self._weights, n_slots, capacity, self.threads)


class PackedSession:
    """See `session.Session`."""

    def __init__(
        self, model: PackedModel, weights: Record, n_slots: int, capacity: int, threads: int
    ) -> None:
        self.cache = _cache(model, n_slots, capacity)
        self.position_bytes = -(-sum(a.nbytes for a in self.cache) // (n_slots * capacity))
        self.config, self.n_slots, self.capacity = model.config, n_slots, capacity
        self.lengths = [0] * n_slots
        self._model, self._weights = model, weights
        self._pool, self._n_phases = ThreadPool(threads), 8 * model.config.n_layer + 3
        self._dtype = np.dtype(ACTIVATION_DTYPES[model.precision])
        self._buffers: Buffers | None = None
        self._buffers_record: Record | None = None
        self._cache_record = Record(self.cache)

    def read(
        self,
        slot_ids: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        all_logits: Collection[int] = (),
    ) -> list[Logits]:
        """Append ids to slots; see `session.Session.read`."""
        self._model.require_whole()
        batch, rows = self._batch(slot_ids, ids, all_logits)
        size = self.config.vocab_size
        is_in_range = 0 <= batch.ids.min() and batch.ids.max() < size
        if not (is_in_range and batch.positions.max() < self.capacity):  # kernels check nothing
            raise UserError(f"ids must be below {size} and positions below {self.capacity}")
        try:
            buffers = self._buffers_for(len(batch.ids), len(batch.outputs))
            records = (self._weights, self._buffers_record, self._cache_record)
            self._pool.run(forward, self._n_phases, *records, batch)
        except MemoryError:
            raise NoRoomError(f"no memory is left to read {len(batch.ids)} ids") from None
        for slot_id, new in zip(slot_ids, ids, strict=True):  # unless it was interrupted by Ctrl-C
            self.lengths[slot_id] += len(new)
        return [buffers.logits[first:end, : self.config.vocab_size] for first, end in rows]

    def sample(self, inputs: Sequence[SamplingInput]) -> list[NextToken | UserError]:
        """Sample a token for each; see `Session.sample`."""
        return sampling.sample(self._pool, inputs)

    def score_targets(
        self, logits: Logits, targets: Sequence[int], n_tokens: int
    ) -> tuple[list[float], list[int]]:
        """Return logprobs and ranks; see `Session.score_targets`."""
        return sampling.score_targets(self._pool, logits, targets, n_tokens)

    def _batch(
        self, slot_ids: Sequence[int], ids: Sequence[Sequence[int]], all_logits: Collection[int]
    ) -> tuple[Batch, list[tuple[int, int]]]:
        """Return the batch of all ids, and for each slot the span of its rows of logits."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[tuple[int, int]] = []
        outputs: list[int] = []
        rows: list[tuple[int, int]] = []
        for slot_id, new in zip(slot_ids, ids, strict=True):
            begin, end = len(tokens), len(tokens) + len(new)
            tokens += new
            positions += range(self.lengths[slot_id], self.lengths[slot_id] + len(new))
            spans.append((begin, end))
            first = len(outputs)
            outputs += range(begin if slot_id in all_logits else end - 1, end)
            rows.append((first, len(outputs)))
        arrays = (tokens, positions, slot_ids, spans, outputs)
        return Batch(*(np.array(values, np.int64) for values in arrays)), rows

    def _buffers_for(self, tokens: int, outputs: int) -> Buffers:
        """Return buffers for this number of tokens and outputs, reused from batch to batch."""
        old = self._buffers
        if old is not None and len(old.h) >= tokens and len(old.logits) >= outputs:
            return old
        if old is None:
            sampling.prepare()  # beside `forward`
        else:
            tokens, outputs = max(tokens, len(old.h)), max(outputs, len(old.logits))
        config, dtype = self.config, self._dtype
        k, inner = padded(config.n_embd), padded(config.inner_dim)
        f32 = np.float32
        n, threads = tokens, self._pool.threads
        self._buffers = Buffers(
            h=np.zeros((n, k), f32),
            x=_vectors(n, k, dtype),
            qkv=np.zeros((n, padded(3 * config.n_embd)), f32),
            attention=np.zeros((n, k), f32),
            mlp=_vectors(n, inner, dtype),
            states=np.zeros((outputs, k), f32),
            logits=np.zeros((outputs, padded(config.vocab_size)), f32),
            normed=np.zeros((threads, k), f32),
            sums=np.zeros((threads, VECTORS, PANEL), f32),
            widened=np.zeros((threads, (PANEL + VECTORS) * max(k, inner)), np.int16),
            p=np.zeros((threads, QUERIES, padded(self.capacity)), f32),
            mixed=np.zeros((threads, QUERIES, padded(config.head_dim)), f32),
        )
        self._buffers_record = Record(self._buffers)
        return self._buffers

    def truncate(self, slot_id: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""
        self.lengths[slot_id] = min(length, self.lengths[slot_id])

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a slot to another slot."""
        self._pool.finish_step()  # an interrupted step must not write to the target later
        n = padded(self.lengths[source])
        c = self.cache
        c.keys[:, target, :, : n // BLOCK] = c.keys[:, source, :, : n // BLOCK]
        for array in (c.values, c.key_scales, c.value_scales):
            array[:, target, :, :n] = array[:, source, :, :n]
        self.lengths[target] = self.lengths[source]


def _vectors(n: int, width: int, dtype: np.dtype[Any]) -> Vectors:
    """Allocate what GEMMs read."""
    scales, sums = np.zeros((n, width // 64), np.float32), np.zeros((n, width // 32), np.int32)
    return Vectors(np.zeros((n, width), dtype), scales, sums)


def _cache(model: PackedModel, n_slots: int, capacity: int) -> Cache:
    """Allocate keys, values and scales; memory is taken when positions are filled."""
    config, room = model.config, padded(capacity)
    size, dtype = padded(config.head_dim), np.dtype(ACTIVATION_DTYPES[model.precision])
    heads = (config.n_layer, n_slots, config.n_head)
    scaled = (*heads, room if dtype == np.int8 else 0)
    n_bytes = 2 * math.prod(heads) * room * size * dtype.itemsize + 8 * math.prod(scaled)
    try:
        return Cache(
            np.zeros((*heads, room // BLOCK, size, BLOCK), dtype),
            np.zeros((*heads, room, size), dtype),
            np.zeros(scaled, np.float32),
            np.zeros(scaled, np.float32),
        )
    except MemoryError:
        what = f"a cache of {n_slots} sequences of {capacity} tokens"
        raise memory_error(n_bytes, what) from None


def _weights(model: PackedModel) -> Weights:
    """Return a model's arrays as kernels take them."""
    config, a = model.config, model.arrays

    def matrix(name: str) -> Matrix:
        return Matrix(a[f"{name}.weights"], a[f"{name}.scales"], a[f"{name}.bias"])

    no_bias = np.zeros(padded(config.vocab_size), np.float32)
    wte = Matrix(a["wte.weights"], a["wte.scales"], no_bias)
    longest = config.n_positions
    windows = [min(config.window(layer) or 0, longest) for layer in range(config.n_layer)]
    return Weights(
        wte=wte,
        wpe=a["wpe"],
        head=wte if config.tie_word_embeddings else matrix("head"),
        c_attn=matrix("c_attn"),
        attn_proj=matrix("attn_proj"),
        c_fc=matrix("c_fc"),
        mlp_proj=matrix("mlp_proj"),
        norms=a["norms"],
        ln_f=a["ln_f"],
        windows=np.array(windows, np.int64),
        epsilon=np.float32(config.layer_norm_epsilon),
        n_embd=config.n_embd,
        n_head=config.n_head,
        post=config.norm == "post",
        activation=ACTIVATIONS[config.activation_function],
    )
