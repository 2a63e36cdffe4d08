"""Attention, MLP and block, which act on the residual stream (B, T, D)."""

from __future__ import annotations

from collections.abc import Callable
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
BLOCK = 64
"""Queries in a block of banded attention."""


def banded_attention(q: Tensor, k: Tensor, v: Tensor, window: int, dropout_p: float) -> Tensor:
    """Return attention within a band: position i sees j if i - window < j <= i.

    q, k, v and the result are (B, H, T, D/H). Each block of queries attends to the keys of its
    positions and of the `window` before them, so no (T, T) scores are formed (the band of Child et
    al. 2019, "Generating Long Sequences with Sparse Transformers").
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
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def extra_repr(self) -> str:
        """Return the window of a banded layer for `print(model)`."""
        return "" if self.window is None else f"window={self.window}"

    def forward(
        self, x: Tensor, layer: int, past: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); position i sees positions j <= i only.

        `mask` (B, 1, T, T) bool narrows that to a document's own positions; not with a cache.
        """
        return self.c_proj(self.mix(self.c_attn(x), layer, past, mask))

    def mix(self, qkv: Tensor, layer: int, past: KVCache | None, mask: Tensor | None) -> Tensor:
        """(B, T, 3D) -> (B, T, D): attention of all heads, concatenated."""
        n_new = qkv.shape[1]
        q, k, v = qkv.unflatten(-1, (3, self.n_head, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D/H)
        if past is not None:
            k, v = past.append(layer, k, v)
            first, mask = past.attention_mask(n_new, self.window)
            k, v = k[:, :, first:], v[:, :, first:]
        elif mask is not None and self.window is not None:
            mask = mask & torch.ones_like(mask).triu(1 - self.window)
        causal = mask is None and (past is None or bool(n_new > 1))
        return self.attend(q, k, v, mask, causal).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """(B, H, T, D/H) thrice -> (B, H, T, D/H): softmax(q k^T / sqrt(D/H)) v, masked."""
        dropout_p = self.attn_pdrop if self.training else 0.0
        if causal and self.window is not None and self.window < q.shape[2]:
            return banded_attention(q, k, v, self.window, dropout_p)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal
        )


def layer_norm(config: GPTConfig) -> nn.LayerNorm:
    """Return a fresh norm over D."""
    return nn.LayerNorm(config.n_embd, config.layer_norm_epsilon, bias=config.bias)


class MLP(nn.Module):
    """Two layers with an activation between, applied at each position alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.inner_dim, config.n_embd, bias=config.bias)
        self.activation = ACTIVATION_FUNCTIONS[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream.

    GPT-2 normalises the input of a sublayer (pre-LN); GPT-1 normalises the sum (post-LN).
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = layer_norm(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.resid_pdrop)
        self.norm = config.norm

    def forward(
        self, x: Tensor, layer: int, past: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.norm == "post":
            x = self.ln_1(x + self.drop(self.attn(x, layer, past, mask)))
            return self.ln_2(x + self.drop(self.mlp(x)))
        x = x + self.drop(self.attn(self.ln_1(x), layer, past, mask))
        return x + self.drop(self.mlp(self.ln_2(x)))
