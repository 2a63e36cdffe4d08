"""Cross-entropy against the rows of a matrix, without ever holding all logits.

The plain computation holds (N, V) logits, their softmax and their gradient: 1.2 GB for 2,048
positions of GPT-2. Here rows are taken a chunk at a time; each chunk's logits are turned into
their own gradient in place and folded into the gradients of h and W at once, so forward and
backward cost the three matrix products of the plain computation and no more. On a CPU the softmax
goes over a few rows at a time, which stay in its cache, and W is brought to the products' dtype a
block at a time, so that no second copy of it is held.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tiedgpt.core.embedding import PredictingGradient
from tiedgpt.errors import UserError

IGNORED = -100
"""A target that is not counted."""

CHUNK_BYTES = 50 << 20
"""Memory for the logits held at a time: 512 rows of V = 50,257 in bf16, 256 in fp32."""

MIN_CHUNK_ROWS = 128
"""Fewer rows would spend the time on adding into the (V, D) gradient once a chunk."""

CACHED_ROWS = 16
"""Rows of fp32 logits that a CPU's cache holds: 3 MB of V = 50,257."""

BLOCK = 2048
"""Rows of W that are cast, and of its gradient that are added to, at a time on a CPU."""


def chunk_rows(n_rows: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return how many rows of logits are formed at a time, all chunks being of one size."""
    at_most = max(MIN_CHUNK_ROWS, CHUNK_BYTES // (dtype.itemsize * vocab_size))
    return -(-n_rows // -(-n_rows // at_most))


def linear_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, predicting: PredictingGradient | None = None
) -> Tensor:
    """Return the mean over counted targets of -log softmax(h W^T)[target], in nats.

    h (N, D), weight W (V, D), targets (N,) int64; -100 is ignored; with nothing to count the mean
    is nan, as in torch. Equals `F.cross_entropy(h @ W.T, targets)` in value and gradients.
    Under autocast the products run in its dtype; sums, softmax and loss are fp32. Backward leaves
    its gradient of W in `predicting`, for who reads with W, too.
    """
    _check_targets(targets, weight.shape[0])
    device = h.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else h.dtype
    needs_grad = torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            h, weight, targets, dtype, needs_grad, predicting
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


class _Blocks:
    """W in the products' dtype: on a CPU a block of rows at a time, in memory that is held once."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        n_rows = weight.shape[0]
        self.cast = weight.dtype != dtype and weight.device.type == "cpu"
        step = BLOCK if self.cast else n_rows
        self.slices = [slice(at, min(n_rows, at + step)) for at in range(0, n_rows, step)]
        self._weight = weight if self.cast else weight.to(dtype)
        self._held = torch.empty(step if self.cast else 0, weight.shape[1], dtype=dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return rows of W, until the next are asked for."""
        if not self.cast:
            return self._weight
        return self._held[: rows.stop - rows.start].copy_(self._weight[rows])

    def add_product(self, sums: Tensor, z: Tensor, h: Tensor) -> None:
        """Add z^T h to sums (V, D), which may be of a wider type."""
        if sums.dtype == z.dtype:
            sums.addmm_(z.T, h)
            return
        for rows in self.slices:
            part = self._held[: rows.stop - rows.start] if self.cast else None
            sums[rows] += torch.mm(z[:, rows].T, h, out=part)


def _loss_and_gradient(logits: Tensor, answers: Tensor, share: Tensor, needs_grad: bool) -> Tensor:
    """Return the sum of a few rows' losses, each times its share; logits become the gradient.

    logits (R, V), answers and share (R, 1). d loss / d logits = share (softmax - onehot).
    """
    z = logits.to(share.dtype)  # the same memory where it is fp32 already
    z -= z.amax(1, keepdim=True)
    z_answer = z.gather(1, answers)
    sums = z.exp_().sum(1, keepdim=True)
    if needs_grad:
        z *= share / sums
        z.scatter_add_(1, answers, -share)
        logits.copy_(z)
    return ((sums.log() - z_answer) * share).masked_fill_(share == 0, 0.0).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; backward hands out what is ready."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        needs_grad: bool,
        predicting: PredictingGradient | None,
    ) -> Tensor:
        sums_in = torch.promote_types(dtype, torch.float32)
        needs_h, needs_w = (needs_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_h = torch.empty_like(h) if needs_h else None
        grad_w = torch.zeros_like(weight, dtype=sums_in) if needs_w else None
        counted = targets != IGNORED
        n_counted = counted.sum().to(sums_in)
        share = (counted * n_counted.clamp(min=1).reciprocal())[:, None]  # of a row in the mean
        answers = targets.long().masked_fill(~counted, 0)[:, None]
        total = torch.zeros((), dtype=sums_in, device=h.device)
        n_rows = chunk_rows(h.shape[0], weight.shape[0], dtype)
        few = CACHED_ROWS if h.device.type == "cpu" else n_rows
        w = _Blocks(weight, dtype)
        logits = torch.empty(min(n_rows, h.shape[0]), weight.shape[0], dtype=dtype, device=h.device)
        for start in range(0, h.shape[0], n_rows):
            rows = slice(start, start + n_rows)
            h_c = h[rows].to(dtype)
            z = logits[: h_c.shape[0]]  # (R, V), the only large tensor
            for block in w.slices:
                torch.mm(h_c, w[block].T, out=z[:, block])
            parts = (tensor.split(few) for tensor in (z, answers[rows], share[rows]))
            for some, answer, scale in zip(*parts, strict=True):
                total += _loss_and_gradient(some, answer, scale, needs_h or needs_w)
            if grad_h is not None:
                grad_h[rows] = sum((z[:, block] @ w[block]).to(sums_in) for block in w.slices)
            if grad_w is not None:
                w.add_product(grad_w, z, h_c)
        ctx.predicting = predicting
        ctx.gradients = (grad_h, None if grad_w is None else grad_w.to(weight.dtype))
        return total.masked_fill(n_counted == 0, torch.nan)  # as in torch

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
        if ctx.predicting is not None:
            ctx.predicting.tensor = grad_w
        return grad_h, grad_w, None, None, None, None


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
