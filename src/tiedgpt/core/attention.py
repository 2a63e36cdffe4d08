"""Causal attention for training in bf16 on a CPU: half the time of torch's kernel there.

Queries go a block at a time, with the keys that they see, through batched products of their own;
backward computes the weights again. Scores and weights are rounded to bf16: at scores of usual size
the result is within 1 % of the exact one, where torch's kernel is within 0.5 %.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 256
"""Queries in a block."""
MIN_POSITIONS = 128
"""Shorter sequences are no faster this way."""


def is_faster(q: Tensor, dropout_p: float) -> bool:
    """Whether `blocked_attention` is meant for these queries (B, H, T, D/H)."""
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and q.requires_grad
        and dropout_p == 0
        and q.shape[2] >= MIN_POSITIONS
        and not torch.compiler.is_compiling()
    )


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, T, D/H) thrice -> (B, H, T, D/H): position i sees positions j <= i."""
    return _BlockedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries, keys and values, (B H, T, D/H)."""
    return (q * q.shape[-1] ** -0.5).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def _weights(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Return the attention weights of queries from `start` on, (B H, R, keys up to the last)."""
    z = torch.bmm(q, k.mT)
    n = q.shape[1]
    hidden = torch.full((n, n), -torch.inf, dtype=z.dtype).triu(1)
    z[:, :, start:] += hidden
    return z.softmax(-1)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = _operands(q, k, v)
        y = torch.empty(queries.shape, dtype=q.dtype)
        for start in range(0, q.shape[2], BLOCK):
            end = min(start + BLOCK, q.shape[2])
            p = _weights(queries[:, start:end], keys[:, :end], start)
            torch.bmm(p, values[:, :end], out=y[:, start:end])
        ctx.save_for_backward(q, k, v, y)
        return y.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, y = ctx.saved_tensors
        queries, keys, values = _operands(q, k, v)
        dy = grad.flatten(0, 1)
        drift = (dy.float() * y.float()).sum(-1, keepdim=True).to(y.dtype)
        dq = torch.empty_like(queries)
        dk, dv = (torch.zeros_like(keys, dtype=torch.float32) for _ in range(2))
        for start in range(0, q.shape[2], BLOCK):
            end = min(start + BLOCK, q.shape[2])
            rows = slice(start, end)
            p = _weights(queries[:, rows], keys[:, :end], start)
            dv[:, :end] += torch.bmm(p.mT, dy[:, rows])
            dz = torch.bmm(dy[:, rows], values[:, :end].mT)
            dz -= drift[:, rows]
            dz *= p
            torch.bmm(dz, keys[:, :end], out=dq[:, rows])
            dk[:, :end] += torch.bmm(dz.mT, queries[:, rows])
        dq *= q.shape[-1] ** -0.5
        return tuple(g.to(q.dtype).view(q.shape) for g in (dq, dk, dv))  # type: ignore[return-value]
