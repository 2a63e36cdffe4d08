"""One step: the gradient of a batch, in parts that fit, clipped and applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiedgpt.errors import DivergedError
from tiedgpt.train.plan import Plan
from tiedgpt.train.task import Arrays, Model, body_of, counts, loss_terms, on_device


@dataclass(frozen=True)
class StepResult:
    """What a step saw before its update."""

    loss: float
    """The loss of the batch: mean cross-entropy, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""


def train_step(
    model: Model, optimizers: Sequence[torch.optim.Optimizer], batch: Arrays, plan: Plan
) -> StepResult:
    """Update the model on a batch; see `task.py` for what that is.

    Raises `DivergedError`, and leaves the weights as they were, where loss or gradient are not
    finite.
    """
    device = body_of(model).wte.weight.device
    whole = on_device(batch, device)
    loss = torch.zeros((), device=device)
    model.zero_grad(set_to_none=True)
    for part in zip(*(torch.split(array, plan.micro_batch) for array in whole), strict=True):
        with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
            terms = loss_terms(model, part)
            shares = (n / m for n, m in zip(counts(terms, part), counts(terms, whole), strict=True))
            part_loss = sum(mean * share for mean, share in zip(terms, shares, strict=True))
        assert isinstance(part_loss, torch.Tensor)
        part_loss.backward()
        loss += part_loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), plan.grad_clip)
    result = StepResult(float(loss), float(norm))
    if not np.isfinite([result.loss, result.grad_norm]).all():
        model.zero_grad(set_to_none=True)
        raise DivergedError(f"the loss became {result.loss}, its gradient {result.grad_norm}")
    for optimizer in optimizers:
        optimizer.step()
    return result
