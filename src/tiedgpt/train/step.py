"""One step: the gradient of a batch, in parts that fit, clipped and applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import DivergedError
from tiedgpt.train.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """What a step saw before its update."""

    loss: float
    """Mean cross-entropy of the batch, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""


def train_step(
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: tuple[np.ndarray, np.ndarray],
    plan: Plan,
) -> StepResult:
    """Update the model on (ids, targets), each (B, T).

    Raises `DivergedError`, and leaves the weights as they were, where loss or gradient are not
    finite.
    """
    device = model.wte.weight.device
    ids, targets = (torch.from_numpy(part).to(device) for part in batch)
    counted = (targets != IGNORED).sum()
    loss = torch.zeros((), device=device)
    model.zero_grad(set_to_none=True)
    for ids_part, targets_part in zip(
        torch.split(ids, plan.micro_batch), torch.split(targets, plan.micro_batch), strict=True
    ):
        share = (targets_part != IGNORED).sum() / counted
        with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
            part = model.loss(ids_part, targets_part) * share
        part.backward()
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), plan.grad_clip)
    result = StepResult(float(loss), float(norm))
    if not np.isfinite([result.loss, result.grad_norm]).all():
        model.zero_grad(set_to_none=True)
        raise DivergedError(f"the loss became {result.loss}, its gradient {result.grad_norm}")
    for optimizer in optimizers:
        optimizer.step()
    return result
