"""Sequences in slots, computed by a `GPT` in torch.

A slot is a row of one KV cache. Rows that are read together are moved side by side, so that they
are a view of the cache. Shorter ones are padded at their ends: with causal attention no token sees
the padding, and it is not counted as read.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from tiedgpt.core.cache import KVCache
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.infer import filters
from tiedgpt.infer.kernels import sampling as kernels
from tiedgpt.infer.kernels.thread_pool import ThreadPool
from tiedgpt.infer.sampling import NextToken, SamplingInput, sample
from tiedgpt.infer.session import Logits, memory_error, require_memory
from tiedgpt.runtime import free_memory

PRECISION_DTYPES = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtype of each precision; None: the dtype of the weights."""
FEW_IDS = 16
"""Ids up to which a shorter sequence is padded, rather than read alone."""
MAX_PADDED = 1.25
"""Longer ones are padded if that multiplies the ids by at most this."""


_lock = threading.Lock()
_before: list[int] = []
"""For each block that runs now, the number of threads that torch was set to before."""


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads, which is the process's, inside the block."""
    with _lock:
        before = _before[0] if _before else torch.get_num_threads()
        _before.append(before)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        with _lock:
            _before.pop()
            torch.set_num_threads(before)


class TorchRunner:
    """A `GPT` on its own device and in its own dtype.

    It computes on `threads`; by default on torch's number in the thread that called it last.
    """

    def __init__(self, model: GPT, threads: int | None = None) -> None:
        self.model, self.threads = model, threads
        self.use_caller_threads()

    def use_caller_threads(self) -> None:
        """Note torch's number of threads: it is set for each thread."""
        self.threads_used = self.threads or torch.get_num_threads()

    @property
    def config(self) -> GPTConfig:
        """The model's config."""
        return self.model.config

    def session(self, *, n_slots: int, capacity: int) -> TorchSession:
        """Allocate a cache (L, n_slots, H, capacity, D/H) twice, or more; see `Runner`."""
        device = self.model.wte.weight.device
        n_bytes = position_bytes(self.model) * n_slots * capacity
        what = f"a cache of {n_slots} sequences of {capacity} tokens"
        if device.type != "cpu":
            require_memory(n_bytes, what, free_memory(device))
        try:
            cache = _zeros(self.config, n_slots, capacity, self.model.wte.weight)
        except MemoryError:
            raise memory_error(n_bytes, what) from None
        return TorchSession(self, cache, n_slots, capacity)


def position_bytes(model: GPT) -> int:
    """Return the bytes that the keys and values of a position take."""
    return 2 * model.config.n_layer * model.config.n_embd * model.wte.weight.itemsize


class TorchSession:
    """Slots in a `KVCache`; see `Session`."""

    def __init__(self, runner: TorchRunner, cache: KVCache, n_slots: int, capacity: int) -> None:
        self._runner = runner
        self.model, self.config = runner.model, runner.config
        self.n_slots, self.capacity = n_slots, capacity
        self.position_bytes = position_bytes(self.model) if cache.keys.device.type == "cpu" else 0
        self._cache = cache
        self._cache_rows = list(range(n_slots))
        """By slot, the row of the cache."""
        threads = min(runner.threads_used, n_slots)
        self._pool = ThreadPool(threads) if kernels.is_compiled() else None
        """The kernels' threads; None: numpy chooses the same tokens."""

    @property
    def lengths(self) -> list[int]:
        """Positions that are filled, by slot."""
        return [self._cache.lengths[row] for row in self._cache_rows]

    def read(
        self,
        slot_ids: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        all_logits: Collection[int] = (),
    ) -> list[Logits]:
        """Append ids to slots and return logits; see `Session.read`."""
        logits: dict[int, Logits] = {}
        if self.model is self._runner.model:
            self.model = _in_eval_mode(self.model)  # its owner may train it meanwhile
        with torch_threads(self._runner.threads_used), torch.inference_mode():
            for group in self._groups(slot_ids, ids):
                its = [slot_ids[i] for i in group], [ids[i] for i in group]
                logits |= zip(group, self._read(*its, all_logits), strict=True)
        return [logits[i] for i in range(len(slot_ids))]

    def sample(self, inputs: Sequence[SamplingInput]) -> list[NextToken | UserError]:
        """Sample a token for each; see `Session.sample`."""
        return sample(inputs) if self._pool is None else kernels.sample(self._pool, inputs)

    def score_targets(
        self, logits: Logits, targets: Sequence[int], n_tokens: int
    ) -> tuple[list[float], list[int]]:
        """Return logprobs and ranks; see `Session.score_targets`."""
        if self._pool is None:
            return filters.score_targets(logits, targets, n_tokens)
        return kernels.score_targets(self._pool, logits, targets, n_tokens)

    def truncate(self, slot_id: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot."""
        row = self._cache_rows[slot_id]
        filled = self._cache.lengths[row]
        if length < filled:
            self._cache.lengths[row] = length
            with torch.inference_mode():  # masked values have weight 0, and 0 times NaN is NaN
                for tensor in (self._cache.keys, self._cache.values):
                    tensor[:, row, :, length:filled] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a slot to another slot."""
        with torch.inference_mode():
            self._cache.copy_row(self._cache_rows[source], self._cache_rows[target])

    def _groups(self, slot_ids: Sequence[int], ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Divide the sequences into groups that are read at once, padded or of one length."""
        counts = [len(new) for new in ids]
        groups = []
        few = [i for i, count in enumerate(counts) if count <= FEW_IDS]
        many = [i for i, count in enumerate(counts) if count > FEW_IDS]
        for together in filter(None, (few, many)):
            longest = max(counts[i] for i in together)
            little = longest * len(together) <= MAX_PADDED * sum(counts[i] for i in together)
            room = max(self.lengths[slot_ids[i]] for i in together) + longest <= self.capacity
            if room and (together is few or little):
                groups.append(together)
            else:
                same = sorted({counts[i] for i in together})
                groups += [[i for i in together if counts[i] == count] for count in same]
        return groups

    def _read(
        self, slot_ids: Sequence[int], ids: Sequence[Sequence[int]], all_logits: Collection[int]
    ) -> list[Logits]:
        """Read rows at once: (B, T) ids -> (B, T, D) states -> the logits that are asked for."""
        first = self._make_neighbours([self._cache_rows[slot_id] for slot_id in slot_ids])
        order = sorted(range(len(slot_ids)), key=lambda i: self._cache_rows[slot_ids[i]])
        counts = [len(ids[i]) for i in order]
        longest = max(counts)
        cache = self._cache.rows(first, first + len(order))
        before = cache.lengths
        padded = [[*ids[i], *[0] * (longest - len(ids[i]))] for i in order]
        h = self.model.body(torch.tensor(padded, device=cache.keys.device), cache)
        ends = [before[row] + count for row, count in enumerate(counts)]
        self._cache.lengths[first : first + len(order)] = ends
        rows = [len(ids[i]) if slot_ids[i] in all_logits else 1 for i in order]
        shapes = enumerate(zip(counts, rows, strict=True))
        states = torch.cat([h[row, count - n : count] for row, (count, n) in shapes])
        logits = self.model.logits(states).float().cpu().split(rows)
        read = {i: its.numpy() for i, its in zip(order, logits, strict=True)}
        return [read[i] for i in range(len(order))]

    def _make_neighbours(self, rows: list[int]) -> int:
        """Move rows that are read together side by side; return the first of them.

        Rows move only if a sequence has come or gone since: then one or two of them.
        """
        if max(rows) - min(rows) + 1 == len(rows):
            return min(rows)
        gaps = [row for row in range(len(rows)) if row not in rows]
        for gap, row in zip(gaps, sorted(row for row in rows if row >= len(rows)), strict=True):
            _exchange(self._cache, gap, row)
            a, b = self._cache_rows.index(gap), self._cache_rows.index(row)
            self._cache_rows[a], self._cache_rows[b] = row, gap
        return 0


def _exchange(cache: KVCache, a: int, b: int) -> None:
    """Exchange two rows of the cache."""
    filled = max(cache.lengths[a], cache.lengths[b])
    for tensor in (cache.keys, cache.values):
        row_a = tensor[:, a, :, :filled].clone()
        tensor[:, a, :, :filled] = tensor[:, b, :, :filled]
        tensor[:, b, :, :filled] = row_a
    cache.lengths[a], cache.lengths[b] = cache.lengths[b], cache.lengths[a]


def _in_eval_mode(model: GPT) -> GPT:
    """Return the model, or a copy in eval mode on the same tensors if a part of it is training.

    The modes of the owner's modules do not change.
    """
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


def _zeros(config: GPTConfig, n_slots: int, capacity: int, weight: torch.Tensor) -> KVCache:
    """Allocate a cache; on a CPU memory is taken when it is filled."""
    if weight.device.type != "cpu":
        return KVCache.allocate(
            config, batch_size=n_slots, capacity=capacity, dtype=weight.dtype, device=weight.device
        )
    shape = (config.n_layer, n_slots, config.n_head, capacity, config.head_dim)
    n_bytes = math.prod(shape) * weight.itemsize
    keys, values = (
        torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(weight.dtype).view(shape)
        for _ in range(2)
    )
    return KVCache(keys, values, [0] * n_slots)
