"""Causal attention of short sequences in bf16 on a CPU, by batched matmuls.

Queries go a block at a time with the keys that they see. Scores and softmax are fp32, so that the
error is that of torch's kernel or less. All of it is plain autograd.

Gain: a step of a 5M-parameter model at 8 x 128 takes 0.75x the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiedgpt.core.layers import Attention
from tiedgpt.train.fast.substitute import Substitute

BLOCK = 128
"""Queries in a block."""
MAX_POSITIONS = 256
"""At 512 positions a step of GPT-2 124M was no faster this way, and took 0.2 GB more."""


class ShortAttention(Substitute, Attention):
    """Attention that goes by blocks where it is trained in bf16 on a CPU, without dropout."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """(B, H, T, D/H) thrice -> (B, H, T, D/H)."""
        n_positions = q.shape[2]
        banded = self.window is not None and self.window < n_positions
        dropped = self.training and self.attn_pdrop > 0
        if (
            causal
            and not (banded or dropped)
            and n_positions <= MAX_POSITIONS
            and q.device.type == "cpu"
            and q.dtype == torch.bfloat16
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            return blocked_attention(q, k, v)
        return super().attend(q, k, v, mask, causal)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, T, D/H) thrice -> (B, H, T, D/H): position i sees positions j <= i."""
    n_sequences, _, n_positions, width = q.shape
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    blocks = []
    for start in range(0, n_positions, BLOCK):
        end = min(start + BLOCK, n_positions)
        hidden = torch.full((end - start, end), -torch.inf).triu(start + 1)
        queries, keys = q[:, start:end].float(), k[:, :end].float()
        scores = torch.baddbmm(hidden, queries, keys.mT, alpha=width**-0.5)
        blocks.append(torch.bmm(scores.softmax(-1).to(v.dtype), v[:, :end]))
    y = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    return y.unflatten(0, (n_sequences, -1))
