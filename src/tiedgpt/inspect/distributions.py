"""Logits of a few positions at a time, and statistics of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.options import read_number

ROWS = 64
"""Number of positions in a chunk: its logits take 13 MB in fp32 for V = 50,257."""


def chunks(n: int) -> Iterator[slice]:
    """Yield the positions 0 to n - 1, a chunk at a time."""
    return (slice(start, min(start + ROWS, n)) for start in range(0, n, ROWS))


def write_chunk(
    columns: dict[str, Tensor], shape: tuple[int, ...], at: Any, chunk: dict[str, Tensor]
) -> None:
    """Write the statistics of a chunk into columns (*shape, ...), which the first chunk allocates.

    Small tensors that are allocated chunk by chunk would fragment the memory of freed logits.
    """
    for name, values in chunk.items():
        if name not in columns:
            columns[name] = values.new_empty(*shape, *values.shape[1:])
        columns[name][at] = values


def upcast(tensor: Tensor) -> Tensor:
    """Convert half precision to fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def logits_of(model: GPT, h: Tensor) -> Tensor:
    """(1, n, D) after the final norm -> (n, V), in fp32 at least; `UserError` if not finite."""
    logits = upcast(model.logits(h)[0])
    if not torch.isfinite(logits.amax(-1)).all():
        raise UserError("the logits are not finite: the weights hold nan or inf, or overflow")
    return logits


def measure(logits: Tensor, targets: Tensor, top: int) -> dict[str, Tensor]:
    """Return statistics of logits (n, V); targets (n,) are -1 for none.

    The statistics are top_ids and top_logprob (n, k), and logprob and rank of the target (n,): NaN
    and 0 without a target. Equal logits have the same rank.
    """
    top = read_number("top", top, int, least=1)
    logprobs, has_target = logits.log_softmax(-1), targets >= 0
    top_ids = logits.topk(min(top, logits.shape[-1])).indices
    answers = targets.clamp(min=0)[:, None]
    ahead = (logits > logits.gather(-1, answers)).sum(-1)
    return {
        "top_ids": top_ids,
        "top_logprob": logprobs.gather(-1, top_ids),
        "logprob": logprobs.gather(-1, answers)[:, 0].masked_fill(~has_target, math.nan),
        "rank": (1 + ahead).masked_fill(~has_target, 0),
    }


def entropy_bits(probs: Tensor) -> Tensor:
    """(..., n) -> (...)."""
    return torch.special.entr(probs).sum(-1) / math.log(2)


def kl_bits(logits: Tensor, other: Tensor) -> Tensor:
    """(n, V) twice -> (n,) KL(softmax(logits) || softmax(other)): what `other` costs more."""
    logprobs = logits.log_softmax(-1)
    p, apart = logprobs.exp(), logprobs - other.log_softmax(-1)
    return (torch.where(p > 0, p * apart, 0.0).sum(-1) / math.log(2)).clamp(min=0)
