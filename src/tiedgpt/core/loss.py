"""Chunked cross-entropy, which never holds all logits.

All logits (N, V), their softmax and their gradient take 1.2 GB for 2,048 positions of GPT-2. The
loss computes one chunk of rows at a time, and recomputes all but the first in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tiedgpt.errors import UserError

INTEGERS = (torch.int64, torch.int32)
IGNORED = -100
"""Target of a position that is not counted."""
CHUNK_BYTES = 50 << 20
"""Memory for the logits of a chunk: 512 rows of V = 50,257 in bf16, 256 in fp32."""


def chunk_rows(n_rows: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return the number of rows in a chunk of logits; all chunks have about the same size."""
    at_most = max(1, CHUNK_BYTES // (dtype.itemsize * vocab_size))
    return -(-n_rows // -(-n_rows // at_most))


def chunked_cross_entropy(
    h: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], n_rows: int
) -> Tensor:
    """Return the mean cross-entropy of `logits(h)`, computed `n_rows` rows at a time.

    h (N, D) and targets (N,) int; -100 is not counted, and with nothing to count the mean is nan,
    as in torch. Softmax and loss are fp32 or wider. `torch.func`, forward-mode derivatives and
    `torch.compile` hold all logits at once.
    """

    def chunk_loss(rows: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy(logits(rows), answers, reduction="sum")

    first, *rest = zip(h.split(n_rows), targets.split(n_rows), strict=True)
    losses = [chunk_loss(*first)]
    if rest and torch.is_grad_enabled() and is_plain_autograd(losses[0]):
        losses += [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in rest]
    else:
        losses += [chunk_loss(*chunk) for chunk in rest]
    n_counted = (targets != IGNORED).sum()
    mean = torch.stack(losses).sum() / n_counted.clamp(min=1)
    return torch.where(n_counted > 0, mean, torch.nan)


def is_plain_autograd(*tensors: Tensor) -> bool:
    """Whether only ordinary backward passes differentiate these tensors.

    Inside `torch.func` a tensor has no storage; with a forward-mode derivative it has a tangent.
    """
    if torch.compiler.is_compiling():
        return False
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except NotImplementedError:
        return False
    return all(forward_ad.unpack_dual(tensor).tangent is None for tensor in tensors)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy () of logits (..., N), in nats over the targets that are not -100.

    Logits of half precision are converted to fp32 first. Raises `UserError` for targets that are
    not one of the N classes.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows, answers = logits.flatten(0, -2).to(dtype), targets.flatten().long()
    try:
        return F.cross_entropy(rows, answers, ignore_index=IGNORED, reduction=reduction)
    except IndexError:
        require_targets(answers, logits.shape[-1])
        raise


def require_target_shape(h: Tensor, targets: Tensor) -> None:
    """Raise `UserError` unless targets (N,) are one integer for each of the states h (N, D)."""
    if targets.shape != h.shape[:1] or not len(targets) or targets.dtype not in INTEGERS:
        raise UserError(
            "targets must be integers, one for each position, and at least one token, got "
            f"{targets.dtype} {tuple(targets.shape)} for h {tuple(h.shape)}"
        )


def require_targets(targets: Tensor, n_classes: int) -> None:
    """Raise `UserError` for targets that are not classes."""
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= n_classes))]
    if wrong.numel():
        raise UserError(
            f"targets must be between 0 and {n_classes - 1}, or {IGNORED} for a position that is "
            f"not counted, got {int(wrong[0])}"
        )
