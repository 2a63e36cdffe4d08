"""One step: the gradient of a batch, in parts that fit, clipped and applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiedgpt.errors import DivergedError
from tiedgpt.train.fast import fast_training
from tiedgpt.train.parallel import World
from tiedgpt.train.task import Arrays, Model, body_of, on_device

if TYPE_CHECKING:
    from tiedgpt.train.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """What a step saw before its update."""

    loss: float
    """The loss of the batch: mean cross-entropy, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""


def train_step(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Arrays,
    plan: Plan,
    world: World | None = None,
) -> StepResult:
    """Update the model on a batch; see `task.py` for what that is.

    Where the model was placed in a `world` of several processes, each computes its share.

    Raises `DivergedError`, and leaves the weights as they were, where loss or gradient are not
    finite.
    """
    device = body_of(model).wte.weight.device
    world = world or World(device)
    objective = world.objective(model)
    whole = on_device(batch, device)
    loss = torch.zeros((), device=device)
    model.zero_grad(set_to_none=True)
    with fast_training(model):
        for part in world.parts(whole, plan.micro_batch):
            with world.summing(part):
                with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
                    part_loss = objective(*part.rows, whole=whole) * part.weight
                part_loss.backward()
            loss += part_loss.detach()
    loss = world.sum(loss) / world.size
    norm = world.clip(model.parameters(), plan.grad_clip)
    result = StepResult(float(loss), float(norm))
    if not np.isfinite([result.loss, result.grad_norm]).all():
        model.zero_grad(set_to_none=True)
        raise DivergedError(f"the loss became {result.loss}, its gradient {result.grad_norm}")
    for optimizer in optimizers:
        optimizer.step()
    return result
