"""The KV cache: keys and values of the tokens already seen, as plain data.

The cache is preallocated for `capacity` positions. A step writes its rows by index and reads a
view. Each sequence has its own length, so prompts of different lengths share one cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.signatures import checked


@dataclass
class KVCache:
    """Keys and values (L, B, H, C, D/H) for C positions, and the length of each sequence."""

    keys: Tensor
    values: Tensor
    lengths: list[int]

    @classmethod
    @checked
    def allocate(
        cls,
        config: GPTConfig,
        *,
        batch_size: int,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Return an empty cache for `capacity` positions (None: the whole context).

        `dtype` must be the keys': the model's dtype, or autocast's.
        """
        capacity = config.n_positions if capacity is None else capacity
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        if not 1 <= capacity <= config.n_positions:
            raise UserError(
                f"capacity must be between 1 and the model's {config.n_positions} positions, "
                f"got {capacity}"
            )
        shape = (config.n_layer, batch_size, config.n_head, capacity, config.head_dim)
        keys = torch.zeros(shape, dtype=dtype, device=device)
        return cls(keys, torch.zeros_like(keys), [0] * batch_size)

    @property
    def capacity(self) -> int:
        """The number of positions that the cache can hold."""
        return self.keys.shape[3]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, H, T, D/H) after each sequence; return all, up to the longest."""
        if k.dtype != self.keys.dtype:
            raise UserError(
                f"the cache holds {self.keys.dtype} and the model computes {k.dtype}: allocate "
                f"it with dtype={k.dtype}"
            )
        if k.requires_grad:
            raise UserError("a KV cache is for inference: call the model under torch.no_grad()")
        n_new, longest = k.shape[2], max(self.lengths)
        alike = min(self.lengths) == longest
        for cached, new in ((self.keys[layer], k), (self.values[layer], v)):
            if alike:
                cached[:, :, longest : longest + n_new] = new
            else:
                for row, start in enumerate(self.lengths):
                    cached[row, :, start : start + n_new] = new[row]
        end = longest + n_new
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def attention_mask(self, n_new: int, window: int | None) -> tuple[int, Tensor | None]:
        """Return the first key that any new position sees, and the mask from that key on.

        The mask is (B, 1, T, keys) bool: a position sees the keys up to itself, and at most the
        last `window` of them. None means that plain causal attention needs no mask.
        """
        shortest, longest = min(self.lengths), max(self.lengths)
        first = 0 if window is None else max(0, shortest + 1 - window)
        if shortest == longest and (n_new == 1 or longest == 0):
            return first, None
        queries = self.positions(n_new)[:, None, :, None]
        keys = torch.arange(first, longest + n_new, device=self.keys.device)
        seen = keys <= queries
        return first, seen if window is None else seen & (keys > queries - window)

    def positions(self, n_new: int) -> Tensor:
        """Return the positions (B, n_new) of the next tokens."""
        starts = torch.tensor(self.lengths, device=self.keys.device)
        return starts[:, None] + torch.arange(n_new, device=self.keys.device)

    def advance(self, n_new: int) -> None:
        """Add `n_new` to every length, once all layers have appended their keys."""
        self.lengths = [length + n_new for length in self.lengths]

    def rows(self, first: int, end: int) -> KVCache:
        """Return a view of the sequences first <= i < end, with a copy of their lengths."""
        rows = slice(first, end)
        return KVCache(self.keys[:, rows], self.values[:, rows], self.lengths[rows])

    def copy_row(self, source: int, target: int) -> None:
        """Copy the sequence in row `source` to row `target`."""
        filled = self.lengths[target] = self.lengths[source]
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :filled] = tensor[:, source, :, :filled]
