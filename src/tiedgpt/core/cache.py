"""Keys and values of the tokens already seen, as plain data.

Room for every position is allocated once; a step writes its rows by index and reads a view. Each
sequence has its own length, so prompts of different lengths share one cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError


@dataclass
class KVCache:
    """Keys and values (L, B, H, C, D/H) with room for C positions, and how many are filled."""

    keys: Tensor
    values: Tensor
    lengths: list[int]

    @classmethod
    def allocate(
        cls,
        config: GPTConfig,
        *,
        batch_size: int,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Return an empty cache for `capacity` positions (the whole context unless told)."""
        capacity = config.n_positions if capacity is None else capacity
        if not 1 <= capacity <= config.n_positions:
            raise UserError(f"a cache of {capacity} positions: the model has {config.n_positions}")
        shape = (config.n_layer, batch_size, config.n_head, capacity, config.head_dim)
        keys = torch.zeros(shape, dtype=dtype, device=device)
        return cls(keys, torch.zeros_like(keys), [0] * batch_size)

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.keys.shape[3]

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, H, T, D/H) after each sequence's length; return all up to the longest."""
        n_new = k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if len(set(self.lengths)) == 1:
            start = self.lengths[0]
            keys[:, :, start : start + n_new] = k
            values[:, :, start : start + n_new] = v
        else:
            for row, start in enumerate(self.lengths):
                keys[row, :, start : start + n_new] = k[row]
                values[row, :, start : start + n_new] = v[row]
        filled = max(self.lengths) + n_new
        return keys[:, :, :filled], values[:, :, :filled]

    def visible(self, n_new: int, window: int | None) -> tuple[int, Tensor | None]:
        """Return the first key that is seen at all, and who sees which key from there on.

        That is (B, 1, T, keys) bool: each new position sees the keys up to its own, `window` of
        them at the most. None where all are seen, or plain causality says it.
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
        """Return the positions (B, n_new) of what comes next."""
        return positions_after(self.lengths, n_new, self.keys.device)

    def advance(self, n_new: int) -> None:
        """Count `n_new` positions as filled, once all layers have stored them."""
        self.lengths = [length + n_new for length in self.lengths]

    def part(self, first: int, end: int) -> KVCache:
        """Return the rows first <= i < end as they lie here: what is stored there is stored here.

        Its lengths are its own.
        """
        rows = slice(first, end)
        return KVCache(self.keys[:, rows], self.values[:, rows], self.lengths[rows])

    def copy(self, source: int, target: int) -> None:
        """Let a row hold what another holds."""
        filled = self.lengths[target] = self.lengths[source]
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :filled] = tensor[:, source, :, :filled]


def positions_after(lengths: list[int], n_new: int, device: torch.device) -> Tensor:
    """Return the positions (B, n_new) of the next tokens of sequences of these lengths."""
    starts = torch.tensor(lengths, device=device)
    return starts[:, None] + torch.arange(n_new, device=device)
