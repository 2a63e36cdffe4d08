"""Attention, MLP and block: what acts on the residual stream (B, T, D)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.cache import KVCache
from tiedgpt.core.config import GPTConfig

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Past:
    """What a block needs to go on from earlier tokens: the cache and who sees whom."""

    cache: KVCache
    mask: Tensor | None
    """(B, 1, T, keys) bool, True where a query may look; None where plain causality says it."""

    @classmethod
    def of(cls, cache: KVCache, n_new: int, device: torch.device) -> Past:
        """Let each new position see every position up to its own: key j, query i, j <= i."""
        longest = max(cache.lengths)
        alike = min(cache.lengths) == longest
        if alike and (n_new == 1 or longest == 0):
            return cls(cache, None)
        queries = positions_after(cache.lengths, n_new, device)[:, None, :, None]
        return cls(cache, torch.arange(longest + n_new, device=device) <= queries)


def positions_after(lengths: list[int], n_new: int, device: torch.device) -> Tensor:
    """Return the positions (B, n_new) of the next tokens of sequences of these lengths."""
    starts = torch.tensor(lengths, device=device)
    return starts[:, None] + torch.arange(n_new, device=device)


class Attention(nn.Module):
    """Causal self-attention with H heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.attn_pdrop = config.attn_pdrop
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, layer: int, past: Past | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); position i sees positions j <= i only."""
        n_new = x.shape[1]
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D/H)
        mask = None
        if past is not None:
            k, v = past.cache.store(layer, k, v)
            mask = past.mask
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.attn_pdrop if self.training else 0.0,
            is_causal=mask is None and n_new > 1,
        )
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers with an activation between, applied at each position alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_dim)
        self.c_proj = nn.Linear(config.inner_dim, config.n_embd)
        self.activation = ACTIVATION_FUNCTIONS[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream.

    GPT-2 normalises what a sublayer reads (pre-LN); GPT-1 normalises the sum (post-LN).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.resid_pdrop)
        self.norm = config.norm

    def forward(self, x: Tensor, layer: int, past: Past | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.norm == "post":
            x = self.ln_1(x + self.drop(self.attn(x, layer, past)))
            return self.ln_2(x + self.drop(self.mlp(x)))
        x = x + self.drop(self.attn(self.ln_1(x), layer, past))
        return x + self.drop(self.mlp(self.ln_2(x)))
