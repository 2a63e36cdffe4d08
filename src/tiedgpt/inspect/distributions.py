"""Logits of a few positions at a time, and the numbers that results keep of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError

ROWS = 64
"""Positions whose logits are held at a time: 13 MB in fp32 for V = 50,257."""


def chunks(n: int) -> Iterator[slice]:
    """Yield the positions 0 to n - 1, a chunk at a time."""
    return (slice(start, min(start + ROWS, n)) for start in range(0, n, ROWS))


def put(
    columns: dict[str, Tensor], shape: tuple[int, ...], at: Any, part: dict[str, Tensor]
) -> None:
    """Write numbers of a chunk into columns (*shape, ...), which the first chunk allocates.

    Small tensors that are kept one by one lie between freed logits, so that malloc cannot use their
    memory again.
    """
    for name, values in part.items():
        if name not in columns:
            columns[name] = values.new_empty(*shape, *values.shape[1:])
        columns[name][at] = values


def wide(tensor: Tensor) -> Tensor:
    """Return half precision as fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def logits_of(model: GPT, h: Tensor) -> Tensor:
    """(1, n, D) after the final norm -> (n, V), in fp32 at least; `UserError` if not finite."""
    logits = wide(model.logits(h)[0])
    if not torch.isfinite(logits.amax(-1)).all():
        raise UserError("the logits are not finite: the weights hold nan or inf, or overflow")
    return logits


def measure(logits: Tensor, targets: Tensor, top: int) -> dict[str, Tensor]:
    """Return the numbers that are kept of logits (n, V); targets (n,), -1 where there is none.

    top_ids and top_logprob (n, k), logprob and rank of the target (n,): NaN and 0 without one. Of
    equal logits none counts as ahead of another.
    """
    if top < 1:
        raise UserError(f"must be at least 1, got {top}", option="top")
    logprobs, known = logits.log_softmax(-1), targets >= 0
    top_ids = logits.topk(min(top, logits.shape[-1])).indices
    answers = targets.clamp(min=0)[:, None]
    ahead = (logits > logits.gather(-1, answers)).sum(-1)
    return {
        "top_ids": top_ids,
        "top_logprob": logprobs.gather(-1, top_ids),
        "logprob": logprobs.gather(-1, answers)[:, 0].masked_fill(~known, math.nan),
        "rank": (1 + ahead).masked_fill(~known, 0),
    }


def entropy_bits(probs: Tensor) -> Tensor:
    """(..., n) -> (...)."""
    return torch.special.entr(probs).sum(-1) / math.log(2)


def kl_bits(logits: Tensor, other: Tensor) -> Tensor:
    """(n, V) twice -> (n,) KL(softmax(logits) || softmax(other)): what `other` costs more."""
    logprobs = logits.log_softmax(-1)
    p, apart = logprobs.exp(), logprobs - other.log_softmax(-1)
    return (torch.where(p > 0, p * apart, 0.0).sum(-1) / math.log(2)).clamp(min=0)
