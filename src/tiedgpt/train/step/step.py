"""A training step: the gradient of a batch in micro-batches, clipped, and an update."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tiedgpt.errors import DivergedError, NoRoomError
from tiedgpt.train.distributed import Processes
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import OWN_LOSS, Arrays, Loss, Model, body_of


@dataclass(frozen=True)
class StepResult:
    """The loss and gradient norm of a step, before its update."""

    loss: float
    """The loss of the batch: mean cross-entropy, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""


def train_step(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Arrays,
    plan: Plan,
    processes: Processes | None = None,
    *,
    objective: Loss = OWN_LOSS,
) -> StepResult:
    """Update the model on a batch, by the loss of an objective or by the model's own.

    Rows without a target are left out. If the model was placed on several `processes`, each
    computes its share.

    Raises `DivergedError`, and leaves the weights as they were, where loss or gradient are not
    finite, or the batch has no targets.
    """
    device = body_of(model).wte.weight.device
    processes = processes or Processes(device)
    module = processes.loss_module(model)
    loss = torch.zeros((), device=device)
    model.zero_grad(set_to_none=True)
    if not any(objective.n_targets(batch)):
        raise DivergedError("the batch has no targets")
    for part in processes.micro_batches(objective, batch, plan.micro_batch):
        with processes.gradient_sync(part):
            with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
                part_loss = module(*part.rows, objective=objective, shares=part.shares)
            part_loss.backward()
        loss += part_loss.detach()
    loss = processes.sum(loss) / processes.size
    norm = processes.clip(model.parameters(), plan.grad_clip)
    result = StepResult(float(loss), float(norm))
    if not np.isfinite([result.loss, result.grad_norm]).all():
        model.zero_grad(set_to_none=True)
        raise DivergedError(f"the loss became {result.loss}, its gradient {result.grad_norm}")
    try:
        for optimizer in optimizers:
            optimizer.step()
    except torch.OutOfMemoryError:  # some weights are updated: the step cannot be repeated
        raise NoRoomError(
            f"{device} has no room for the optimizer state", hint="use a smaller --micro-batch"
        ) from None
    return result


def find_not_finite_weights(model: Model) -> str | None:
    """Return the name of the first parameter whose local shard is not finite, or None."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not bool(local.isfinite().all()):
            return name
    return None


def find_not_finite(model: Model, objective: Loss, batch: Arrays, plan: Plan) -> str:
    """Compute the batch again; return the first tensor that is not finite as a clause, or ""."""
    for name, parameter in model.named_parameters():
        if n := _count_not_finite(parameter):
            return f"; first not finite: the weights {name} ({n:,} of {parameter.numel():,})"
    tensors: list[str] = []

    def look(what: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and (n := _count_not_finite(tensor)):
            tensors.append(f"{what} ({n:,} of {tensor.numel():,})")

    def watch(name: str, part: nn.Module | nn.Parameter) -> RemovableHandle:
        if isinstance(part, nn.Module):
            return part.register_forward_hook(lambda *args: look(f"the output of {name}", args[-1]))
        return part.register_post_accumulate_grad_hook(
            lambda parameter: look(f"the gradient of {name}", parameter.grad)
        )

    with contextlib.ExitStack() as watched:
        for name, part in (*model.named_modules(), *model.named_parameters()):
            if name and (isinstance(part, nn.Module) or part.requires_grad):
                watched.enter_context(watch(name, part))
        with contextlib.suppress(DivergedError):
            train_step(model, [], batch, plan, objective=objective)
    model.zero_grad(set_to_none=True)
    return f"; first not finite: {tensors[0]}" if tensors else ""


@torch.no_grad()
def _count_not_finite(tensor: Tensor) -> int:
    return int(tensor.numel() - tensor.isfinite().sum())
