"""The loss and its gradients of h and W in one pass over the rows.

Each chunk's logits are turned into their own gradient in place and added to the gradients of h and
W at once, so that forward and backward cost the three matmuls of the plain computation on all
logits, and one chunk is held. On a CPU the softmax takes a few rows at a time, which stay in its
cache, and W is cast a block of rows at a time: no copy of it is held. Where gradients are taken in
any other way than by one backward pass, the plain loss is used.

If V is a multiple of 16, our kernel replaces softmax and its gradient by torch. Gain: steps of
`tiny` and `little` take 0.97x and 0.98x the time in bf16, 0.99x in fp32 (two cores of Zen 4). The
first run on a machine compiles it in half a second.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import module

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.loss import (
    IGNORED,
    chunk_rows,
    chunked_cross_entropy,
    is_plain_autograd,
    require_target_shape,
    require_targets,
)
from tiedgpt.core.model import GPT
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.train.step.fast.matmul import IMAGES, add_weight_gradient, is_onednn_faster, linear
from tiedgpt.train.step.fast.threads import run, suits_kernels
from tiedgpt.train.step.substitute import Substitute
from tiedgpt.weights.parameters import head_matrix

KERNEL = Kernel("tiedgpt.train.step.kernels.elementwise", "softmax_gradient")
CACHED_BYTES = 3 << 20
"""Bytes of fp32 logits that fit a CPU's cache: 16 rows of V = 50,257."""
BLOCK = 2048
"""Rows of W that are cast or given to oneDNN, and of its gradient, at a time on a CPU."""


class OnePassLoss(Substitute, GPT):
    """A GPT whose loss takes one pass where its logits are h W^T and it is trained."""

    def head_loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return the loss () of h (N, D) and targets (N,)."""
        matrix = self._plain_matrix()
        is_trained = torch.is_grad_enabled() and type(h) is Tensor
        if matrix is None or matrix.device != h.device or not is_trained:
            return super().head_loss(h, targets)
        if not is_plain_autograd(h, matrix):
            return super().head_loss(h, targets)
        require_target_shape(h, targets)
        return one_pass_cross_entropy(h, matrix, targets)

    def _plain_matrix(self) -> Tensor | None:
        """Return the matrix (V, D) where `logits(h)` is exactly h W^T, else None."""
        if "logits" in vars(self):
            return None
        if self.head is not None:
            return None if _has_global_hooks() else head_matrix(self.head)
        as_built = getattr(type(self.wte), "unembed", None) is TiedEmbedding.unembed
        return self.wte.weight if as_built and "unembed" not in vars(self.wte) else None


def _has_global_hooks() -> bool:
    """Whether a hook sees the calls of every module (`register_module_forward_hook`, ...).

    torch has no function that says so; its tables of such hooks have names of one form.
    """
    tables = (table for name, table in vars(module).items() if name.startswith("_global_"))
    return any(isinstance(table, dict) and table for table in tables)


def one_pass_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over counted targets of -log softmax(h W^T)[target], in nats.

    h (N, D), weight W (V, D), targets (N,) int; -100 is not counted; with nothing to count the
    mean is nan, as in torch. Under autocast the matmuls run in its dtype; sums, softmax and loss
    are fp32. Raises `UserError` for targets outside the vocabulary.
    """
    device, dtype = h.device.type, h.dtype
    autocast: AbstractContextManager[Any] = nullcontext()
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if on and dtype != torch.float64:  # autocast leaves float64 alone
        dtype, autocast = torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)
    if device == "cpu" and type(targets) is Tensor:
        require_targets(targets, len(weight))
    with autocast:
        return _OnePass.apply(h, weight, targets, dtype)  # type: ignore[no-untyped-call]


class _OnePass(torch.autograd.Function):
    """The loss; the gradients of h and W are computed with it and wait for the backward pass."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        needs_h, needs_w, *_ = ctx.needs_input_grad
        loss, *gradients = _loss_and_gradients(h, weight, targets, dtype, needs_h, needs_w)
        ctx.save_for_backward(h, weight, targets)
        ctx.gradients, ctx.dtype = gradients, dtype  # they have no graph: this is no cycle
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, targets = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or not is_plain_autograd(grad_loss):
            return *_plain_gradients(h, weight, targets, ctx.dtype, grad_loss, needed), None, None
        gradients, ctx.gradients = ctx.gradients, None  # whoever gets them may change them
        if gradients is None:  # a second pass through a retained graph
            _, *gradients = _loss_and_gradients(h, weight, targets, ctx.dtype, *needed)
        if h.device.type != "cpu" or not bool(grad_loss == 1):
            for gradient in (gradient for gradient in gradients if gradient is not None):
                gradient.mul_(grad_loss)
        return *gradients, None, None


def _plain_gradients(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    grad_loss: Tensor,
    needed: tuple[bool, bool],
) -> list[Tensor | None]:
    """Return gradients by the core's loss, which can be differentiated again or vectorized."""
    is_narrow = dtype not in (h.dtype, weight.dtype)
    autocast = torch.autocast(h.device.type, dtype, enabled=True) if is_narrow else nullcontext()
    is_differentiated_again = torch.is_grad_enabled()
    with torch.enable_grad(), autocast:
        h, weight = h.view_as(h), weight.view_as(weight)  # W is not what h was computed from
        rows = chunk_rows(len(h), len(weight), dtype)
        loss = chunked_cross_entropy(h, targets, lambda some: F.linear(some, weight), rows)
    inputs = [tensor for tensor, is_needed in zip((h, weight), needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(loss, inputs, grad_loss, create_graph=is_differentiated_again))
    return [next(found) if is_needed else None for is_needed in needed]


def _loss_and_gradients(
    h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, needs_h: bool, needs_w: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss and its gradients of h and W, all computed in one pass over the chunks."""
    sums_in = torch.promote_types(dtype, torch.float32)
    grad_h = torch.empty_like(h) if needs_h else None
    grad_w = torch.zeros_like(weight, dtype=sums_in) if needs_w else None
    answers, share, any_counted = _shares(targets, sums_in)
    total = torch.zeros((), dtype=sums_in, device=h.device)
    vocab_size, on_cpu = weight.shape[0], h.device.type == "cpu"
    n_rows = chunk_rows(h.shape[0], vocab_size, dtype)
    n_rows -= n_rows % IMAGES if n_rows > IMAGES else 0
    logits = h.new_empty(min(n_rows, h.shape[0]), vocab_size, dtype=dtype)
    few, replace = n_rows, _replace_by_gradient
    if suits_kernels(logits[:1]):
        replace = _replace_by_gradient_in_kernel
    elif on_cpu:
        few = max(1, CACHED_BYTES // (sums_in.itemsize * vocab_size))
    weight_dtype = weight.dtype
    weight = weight if on_cpu else weight.to(dtype)
    by_blocks = on_cpu and (weight.dtype != dtype or is_onednn_faster())
    step = min(BLOCK, vocab_size) if by_blocks else vocab_size
    blocks = [slice(at, min(at + step, vocab_size)) for at in range(0, vocab_size, step)]
    buffer = h.new_empty(step if weight.dtype != dtype else 0, h.shape[1], dtype=dtype)

    def narrow(block: slice) -> Tensor:  # valid until the next one
        rows = weight[block]
        return rows if rows.dtype == dtype else buffer[: len(rows)].copy_(rows)

    for start in range(0, h.shape[0], n_rows):
        rows = slice(start, start + n_rows)
        h_c = h[rows].to(dtype)
        z = logits[: h_c.shape[0]]  # (R, V), the only large tensor
        for block in blocks:
            linear(h_c, narrow(block), out=z[:, block])
        parts = (tensor.split(few) for tensor in (z, answers[rows], share[rows]))
        for some, answer, scale in zip(*parts, strict=True):
            total += replace(some, answer, scale)
        if grad_h is not None:
            grad_h[rows] = sum(linear(z[:, b], narrow(b).T).to(sums_in) for b in blocks)
        if grad_w is not None:
            for block in blocks:
                add_weight_gradient(grad_w[block], h_c, z[:, block])
    grad_w = None if grad_w is None else grad_w.to(weight_dtype)
    return torch.where(any_counted, total, torch.nan), grad_h, grad_w


def _replace_by_gradient(logits: Tensor, answers: Tensor, share: Tensor) -> Tensor:
    """Replace logits by their gradient; return the sum of the rows' losses, times their shares.

    logits (R, V), answers and share (R, 1). d loss / d logits = share (softmax - onehot).
    """
    z = logits.to(share.dtype)  # the same memory where it is fp32 already
    z -= z.amax(1, keepdim=True)
    z_answer = z.gather(1, answers)
    sums = z.exp_().sum(1, keepdim=True)
    z *= share / sums
    z.scatter_add_(1, answers, -share)
    logits.copy_(z)
    return ((sums.log() - z_answer) * share).masked_fill_(share == 0, 0.0).sum()


def _replace_by_gradient_in_kernel(logits: Tensor, answers: Tensor, share: Tensor) -> Tensor:
    """Do the same by our kernel, if `suits_kernels(logits)`."""
    scratch = share.new_empty(torch.get_num_threads(), logits.shape[1])
    losses = torch.empty_like(share)
    run(KERNEL, logits.shape[1], logits, answers, share, scratch, losses)
    return losses.sum()


def _shares(targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return answers (N, 1), each row's share in the mean (N, 1), and whether any is counted."""
    counted = targets != IGNORED
    n_counted = counted.sum().to(dtype)
    share = (counted * n_counted.clamp(min=1).reciprocal())[:, None]
    return targets.long().masked_fill(~counted, 0)[:, None], share, n_counted > 0
