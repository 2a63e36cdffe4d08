"""Cross-entropy against the rows of a matrix, without ever holding all logits.

The plain computation holds (N, V) logits, their softmax and their gradient: 1.2 GB for 2,048
positions of GPT-2. Here rows are taken a chunk at a time. Each chunk's logits are turned into
their own gradient in place and added to the gradients of h and W at once, so forward and backward
cost the three matmuls of the plain computation and no more. On a CPU the softmax takes a few rows
at a time, which stay in its cache, and W is cast a block of rows at a time: no copy of it is held.

Only autograd adds the gradients of W up: this loss returns its own, whatever else uses W.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over counted targets of -log softmax(h W^T)[target], in nats.

    h (N, D), weight W (V, D), targets (N,) int; -100 is ignored; with nothing to count the mean is
    nan, as in torch. Equals `F.cross_entropy(h @ W.T, targets)` in value and in all gradients.
    Under autocast the matmuls run in its dtype; sums, softmax and loss are fp32. Gradients of
    gradients and `torch.func` hold all logits at once, as does `torch.compile`.

    Raises `UserError` for targets outside the vocabulary.
    """
    if torch.compiler.is_compiling():
        return _cross_entropy(F.linear(h, weight), targets)
    device, dtype = h.device.type, h.dtype
    autocast: AbstractContextManager[Any] = nullcontext()
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if on and dtype != torch.float64:  # autocast leaves float64 alone
        dtype, autocast = torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)
    needs_h, needs_w = (torch.is_grad_enabled() and t.requires_grad for t in (h, weight))
    with autocast:
        results = _LinearCrossEntropy.apply(h, weight, targets, dtype, needs_h, needs_w)  # type: ignore[no-untyped-call]
    return results[0]


def chunked_cross_entropy(h: Tensor, logits: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Return the same loss for any `logits`, (N, D) -> (N, V), called with a chunk at a time.

    Each chunk is computed again in the backward pass, so at most one chunk's logits are held;
    `torch.func.grad` holds all.
    """

    def chunk_loss(rows: Tensor, answers: Tensor) -> Tensor:
        return _cross_entropy(logits(rows), answers, reduction="sum")

    chunks = list(zip(h.split(MIN_CHUNK_ROWS), targets.split(MIN_CHUNK_ROWS), strict=True))
    if len(chunks) > 1 and torch.is_grad_enabled():
        try:
            losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
        except RuntimeError as error:  # torch.func has no hooks, which checkpoints are made of
            if "saved tensor hooks" not in str(error):
                raise
            losses = [chunk_loss(*chunk) for chunk in chunks]
    else:
        losses = [chunk_loss(*chunk) for chunk in chunks]
    return torch.stack(losses).sum() / (targets != IGNORED).sum()


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    try:
        return F.cross_entropy(wide, targets.long(), ignore_index=IGNORED, reduction=reduction)
    except IndexError:
        require_targets(targets, logits.shape[-1])
        raise


def require_targets(targets: Tensor, vocab_size: int) -> None:
    """Raise `UserError` for targets outside the vocabulary."""
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= vocab_size))]
    if wrong.numel():
        raise UserError(
            f"targets must be between 0 and {vocab_size - 1}, or {IGNORED} for a position that is "
            f"not counted, got {int(wrong[0])}"
        )


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


def _shares(targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return answers (N, 1), each row's share in the mean (N, 1), and whether any is counted."""
    counted = targets != IGNORED
    n_counted = counted.sum().to(dtype)
    share = (counted * n_counted.clamp(min=1).reciprocal())[:, None]
    return targets.long().masked_fill(~counted, 0)[:, None], share, n_counted > 0


class _LinearCrossEntropy(torch.autograd.Function):
    """(loss, d loss / d h, d loss / d W): all three are computed in one pass over the chunks."""

    @staticmethod
    def forward(
        h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, needs_h: bool, needs_w: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if targets.device.type == "cpu" and type(targets) is Tensor:
            require_targets(targets, weight.shape[0])
        sums_in = torch.promote_types(dtype, torch.float32)
        grad_h = torch.empty_like(h) if needs_h else None
        grad_w = torch.zeros_like(weight, dtype=sums_in) if needs_w else None
        answers, share, any_counted = _shares(targets, sums_in)
        total = torch.zeros((), dtype=sums_in, device=h.device)
        vocab_size, n_rows = weight.shape[0], chunk_rows(h.shape[0], weight.shape[0], dtype)
        on_cpu = h.device.type == "cpu"
        few = CACHED_ROWS if on_cpu else n_rows
        weight = weight if on_cpu else weight.to(dtype)
        step = min(BLOCK, vocab_size) if weight.dtype != dtype else vocab_size
        blocks = [slice(at, min(at + step, vocab_size)) for at in range(0, vocab_size, step)]
        buffer = h.new_empty(step if weight.dtype != dtype else 0, h.shape[1], dtype=dtype)

        def narrow(block: slice) -> Tensor:  # valid until the next one
            rows = weight[block]
            return rows if rows.dtype == dtype else buffer[: len(rows)].copy_(rows)

        logits = h.new_empty(min(n_rows, h.shape[0]), vocab_size, dtype=dtype)
        for start in range(0, h.shape[0], n_rows):
            rows = slice(start, start + n_rows)
            h_c = h[rows].to(dtype)
            z = logits[: h_c.shape[0]]  # (R, V), the only large tensor
            for block in blocks:
                torch.mm(h_c, narrow(block).T, out=z[:, block])
            parts = (tensor.split(few) for tensor in (z, answers[rows], share[rows]))
            for some, answer, scale in zip(*parts, strict=True):
                total += _loss_and_gradient(some, answer, scale, needs_h or needs_w)
            if grad_h is not None:
                grad_h[rows] = sum((z[:, block] @ narrow(block)).to(sums_in) for block in blocks)
            for sums, block in () if grad_w is None else ((grad_w[b], b) for b in blocks):
                if sums.dtype == dtype:
                    sums.addmm_(z[:, block].T, h_c)
                else:
                    out = buffer[: len(sums)] if len(buffer) else None
                    sums += torch.mm(z[:, block].T, h_c, out=out)
        grad_w = None if grad_w is None else grad_w.to(weight.dtype)
        return torch.where(any_counted, total, torch.nan), grad_h, grad_w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        h, weight, targets, ctx.dtype, _, _ = inputs
        _, grad_h, grad_w = output
        ctx.save_for_backward(h, weight, targets)
        ctx.gradients = grad_h, grad_w  # they have no graph: this is no cycle
        ctx.mark_non_differentiable(*(g for g in (grad_h, grad_w) if g is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        h, weight, targets = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if grad_loss is None:
            return (None,) * 6
        if torch.is_grad_enabled():  # create_graph=True or torch.func: they are differentiated
            found = _gradients(h, weight, targets, ctx.dtype, grad_loss)
            return *(g if n else None for g, n in zip(found, needed, strict=True)), *(None,) * 4
        ready, ctx.gradients = ctx.gradients, None  # whoever gets them may change them
        if ready is None:  # a second pass through a retained graph
            ready = _LinearCrossEntropy.forward(h, weight, targets, ctx.dtype, *needed)[1:]
        return *(None if g is None else _scaled(g, grad_loss) for g in ready), *(None,) * 4

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode derivatives."""
        raise UserError(
            "model.loss has no forward-mode derivative (jvp, jacfwd, hessian): differentiate "
            "F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        """Compute one loss after another."""
        alone = [
            [x if dim is None else x.select(dim, at) for x, dim in zip(given, in_dims, strict=True)]
            for at in range(info.batch_size)
        ]
        for one in alone:  # a tensor inside vmap does not say that it requires a gradient
            one[4:] = (torch.is_grad_enabled() and tensor.requires_grad for tensor in one[:2])
        results = zip(*(_LinearCrossEntropy.apply(*one) for one in alone), strict=True)  # type: ignore[no-untyped-call]
        stacked = [None if one[0] is None else torch.stack(one) for one in results]
        return tuple(stacked), tuple(None if one is None else 0 for one in stacked)


def _scaled(gradient: Tensor, grad_loss: Tensor) -> Tensor:
    """Return gradient * grad_loss, in its own memory if possible."""
    try:
        if grad_loss.device.type == "cpu" and bool(grad_loss == 1):
            return gradient
        return gradient.mul_(grad_loss)
    except RuntimeError:  # is_grads_batched, or a fake tensor
        return gradient * grad_loss


def _gradients(
    h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, grad_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same gradients of h and W by operations that can be differentiated again."""
    sums_in = torch.promote_types(dtype, torch.float32)
    answers, share, _ = _shares(targets, sums_in)
    narrow_h, narrow_w = h.to(dtype), weight.to(dtype)
    z = (narrow_h @ narrow_w.T).to(sums_in)
    onehot = answers == torch.arange(weight.shape[0], device=z.device)
    dz = ((z.softmax(-1) - onehot.to(sums_in)) * (share * grad_loss)).to(dtype)
    return (dz @ narrow_w).to(h.dtype), (dz.T @ narrow_h).to(weight.dtype)
