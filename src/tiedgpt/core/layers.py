"""Attention, MLP and block: what acts on the residual stream (B, T, D)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.attention import blocked_attention, is_faster
from tiedgpt.core.cache import KVCache
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.product import Product, recomputed

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


BLOCK = 64
"""Queries in a block of banded attention."""


@dataclass(frozen=True)
class Past:
    """What a block needs to go on from earlier tokens: the cache, and how many tokens are new."""

    cache: KVCache
    n_new: int

    def visible(self, window: int | None) -> tuple[int, Tensor | None]:
        """Return the first key that is seen at all, and who sees which key from there on.

        That is (B, 1, T, keys) bool: each new position sees the keys up to its own, `window` of
        them at the most. None where all are seen, or plain causality says it.
        """
        lengths = self.cache.lengths
        shortest, longest = min(lengths), max(lengths)
        first = 0 if window is None else max(0, shortest + 1 - window)
        if shortest == longest and (self.n_new == 1 or longest == 0):
            return first, None
        device = self.cache.keys.device
        queries = positions_after(lengths, self.n_new, device)[:, None, :, None]
        keys = torch.arange(first, longest + self.n_new, device=device)
        seen = keys <= queries
        return first, seen if window is None else seen & (keys > queries - window)


def positions_after(lengths: list[int], n_new: int, device: torch.device) -> Tensor:
    """Return the positions (B, n_new) of the next tokens of sequences of these lengths."""
    starts = torch.tensor(lengths, device=device)
    return starts[:, None] + torch.arange(n_new, device=device)


def banded_attention(q: Tensor, k: Tensor, v: Tensor, window: int, dropout_p: float) -> Tensor:
    """(B, H, T, D/H) thrice -> (B, H, T, D/H): position i sees j where i - window < j <= i.

    Queries go in blocks, each with the keys of its own positions and of the `window` before them:
    no (T, T) scores are formed (the band of Child et al. 2019, "Generating Long Sequences with
    Sparse Transformers").
    """
    n_sequences, n_head, n_positions = q.shape[:3]
    n_blocks = -(-n_positions // BLOCK)
    end, span = n_blocks * BLOCK - n_positions, window + BLOCK
    q = F.pad(q, (0, 0, 0, end)).unflatten(2, (n_blocks, BLOCK)).flatten(0, 1)
    k, v = (F.pad(t, (0, 0, window, end)).unfold(2, span, BLOCK).flatten(0, 1).mT for t in (k, v))
    before = torch.arange(BLOCK, device=q.device)[:, None]
    key = torch.arange(span, device=q.device)
    block = torch.arange(n_blocks, device=q.device)[:, None, None]
    seen = (before < key) & (key <= before + window) & (key + block * BLOCK >= window)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None], dropout_p=dropout_p)
    return y.flatten(1, 2)[:, :n_positions].unflatten(0, (n_sequences, n_head))


class Attention(nn.Module):
    """Causal self-attention with H heads, over all positions or a band of them."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.attn_pdrop = config.attn_pdrop
        self.window = config.window(layer)
        self.c_attn = Product(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Product(config.n_embd, config.n_embd, bias=config.bias)

    def extra_repr(self) -> str:
        """Say in `print(model)` how far a banded layer looks."""
        return "" if self.window is None else f"window={self.window}"

    def forward(self, x: Tensor, layer: int, past: Past | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); position i sees positions j <= i only."""
        n_new = x.shape[1]
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D/H)
        dropout_p = self.attn_pdrop if self.training else 0.0
        mask = None
        if past is not None:
            k, v = past.cache.store(layer, k, v)
            first, mask = past.visible(self.window)
            k, v = k[:, :, first:], v[:, :, first:]
        causal = mask is None and n_new > 1
        if causal and self.window is not None and self.window < n_new:
            y = banded_attention(q, k, v, self.window, dropout_p)
        elif causal and is_faster(q, dropout_p):
            y = blocked_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal
            )
        return self.c_proj(y.transpose(1, 2).flatten(2))


def layer_norm(config: GPTConfig) -> nn.LayerNorm:
    """Return a fresh norm over D."""
    return nn.LayerNorm(config.n_embd, config.layer_norm_epsilon, bias=config.bias)


class MLP(nn.Module):
    """Two layers with an activation between, applied at each position alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Product(config.n_embd, config.inner_dim, bias=config.bias)
        self.c_proj = Product(config.inner_dim, config.n_embd, bias=config.bias)
        self.activation = ACTIVATION_FUNCTIONS[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        z = self.c_fc(x)
        y = self.activation(z)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.c_proj(y)
        with recomputed(y, lambda: self.activation(z)):
            return self.c_proj(y)


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream.

    GPT-2 normalises what a sublayer reads (pre-LN); GPT-1 normalises the sum (post-LN).
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = layer_norm(config)
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
