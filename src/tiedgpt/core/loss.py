"""Cross-entropy against the rows of a matrix, without ever holding all logits.

The plain computation holds (N, V) logits, their softmax and their gradient: 1.2 GB for 2,048
positions of GPT-2. Here rows are taken a chunk at a time; each chunk's logits are turned into
their own gradient in place and folded into the gradients of h and W at once, so forward and
backward cost the three matrix products of the plain computation and no more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tiedgpt.errors import UserError

IGNORED = -100
"""A target that is not counted."""

CHUNK_BYTES = 48 << 20
"""Memory for the fp32 logits held at a time: 250 rows of V = 50,257."""

MIN_CHUNK_ROWS = 128
"""Fewer rows would spend the time on adding into the (V, D) gradient once a chunk."""


def chunk_rows(vocab_size: int) -> int:
    """Return how many rows of logits are formed at a time."""
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over counted targets of -log softmax(h W^T)[target], in nats.

    h (N, D), weight W (V, D), targets (N,) int64; -100 is ignored; with nothing to count the mean
    is nan, as in torch. Equals `F.cross_entropy(h @ W.T, targets)` in value and gradients.
    Under autocast the products run in its dtype; sums, softmax and loss are fp32.
    """
    _check_targets(targets, weight.shape[0])
    device = h.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else h.dtype
    needs_grad = torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            h, weight, targets, dtype, needs_grad
        )


def head_cross_entropy(h: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """Return the same loss through any module (N, D) -> (N, V), its logits a chunk at a time.

    Each chunk is computed again in the backward pass, so at most one chunk's logits are held.
    """

    def chunk_loss(rows: Tensor, answers: Tensor) -> Tensor:
        logits = head(rows)
        _check_targets(answers, logits.shape[-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, answers.long(), ignore_index=IGNORED, reduction="sum")

    total = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
    for rows, answers in zip(
        torch.split(h, MIN_CHUNK_ROWS), torch.split(targets, MIN_CHUNK_ROWS), strict=True
    ):
        total = total + checkpoint(chunk_loss, rows, answers, use_reentrant=False)
    return total / (targets != IGNORED).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; backward hands out what is ready."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, needs_grad: bool
    ) -> Tensor:
        grad_h = torch.empty_like(h) if needs_grad and ctx.needs_input_grad[0] else None
        grad_w = None
        if needs_grad and ctx.needs_input_grad[1]:
            grad_w = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32))
        w = weight.to(dtype)
        counted = targets != IGNORED
        answers = targets.long().masked_fill(~counted, 0)
        sums_in = torch.promote_types(dtype, torch.float32)
        n_counted = counted.sum().to(sums_in)
        scale = n_counted.clamp(min=1).reciprocal()
        total = torch.zeros((), dtype=sums_in, device=h.device)
        n_rows = chunk_rows(weight.shape[0])
        for start in range(0, h.shape[0], n_rows):
            rows = slice(start, start + n_rows)
            h_c, keep = h[rows].to(dtype), counted[rows, None]
            answer = answers[rows, None]
            z = (h_c @ w.T).to(sums_in)  # (R, V), the only large tensor
            z -= z.amax(1, keepdim=True)
            z_answer = z.gather(1, answer)
            sums = z.exp_().sum(1, keepdim=True)
            total += (sums.log() - z_answer).masked_fill_(~keep, 0.0).sum()
            if grad_h is None and grad_w is None:
                continue
            row_scale = keep * scale
            z *= row_scale / sums  # in place: d loss / d z = (softmax - onehot) / counted
            z.scatter_add_(1, answer, -row_scale)
            dz = z.to(dtype)
            if grad_h is not None:
                grad_h[rows] = dz @ w
            if grad_w is not None and dtype == grad_w.dtype:
                grad_w.addmm_(dz.T, h_c)
            elif grad_w is not None:
                for some, dz_some in zip(grad_w.split(8192), dz.split(8192, 1), strict=True):
                    some += dz_some.T @ h_c
        ctx.gradients = (grad_h, None if grad_w is None else grad_w.to(weight.dtype))
        return total / n_counted  # nan where nothing is counted, as in torch

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss keeps its gradients for one backward pass; compute it anew"
            )
        grad_h, grad_w = ctx.gradients
        ctx.gradients = None
        for gradient in (grad_h, grad_w):
            if gradient is not None:
                gradient.mul_(grad_loss)
        return grad_h, grad_w, None, None, None


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    """Refuse targets outside the vocabulary where looking costs no wait for a device."""
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= vocab_size))]
    if wrong.numel():
        raise UserError(
            f"target {int(wrong[0])} is no id of a vocabulary of {vocab_size} tokens; "
            f"{IGNORED} marks a position that is not counted"
        )
