"""One step: the gradient of a batch, in parts that fit, clipped and applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiedgpt.errors import DivergedError
from tiedgpt.train.fast import fast_training
from tiedgpt.train.objective import OWN_LOSS, Arrays, Loss, Model, body_of
from tiedgpt.train.parallel import World
from tiedgpt.train.schedule import Plan


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
    *,
    task: Loss = OWN_LOSS,
) -> StepResult:
    """Update the model on a batch, by the loss of a task or by the model's own.

    Rows without a target are left out. Where the model was placed in a `world` of several
    processes, each computes its share.

    Raises `DivergedError`, and leaves the weights as they were, where loss or gradient are not
    finite, or the batch has no targets.
    """
    device = body_of(model).wte.weight.device
    world = world or World(device)
    objective = world.objective(model)
    loss = torch.zeros((), device=device)
    model.zero_grad(set_to_none=True)
    if not any(task.n_targets(batch)):
        raise DivergedError("the batch has no targets")
    with fast_training(model):
        for part in world.micro_batches(task, batch, plan.micro_batch):
            with world.gradient_sync(part):
                with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
                    part_loss = objective(*part.rows, task=task, shares=part.shares)
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
