"""A training step, and the recent losses that decide whether a run goes on.

A step computes the gradient of a batch in micro-batches, clips it and updates the weights. Every
checkpoint holds the `RunState`, so a resumed run ends or fails at the same step as an unbroken one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tiedgpt.errors import CorruptInputError, DivergedError, NoRoomError
from tiedgpt.train.distributed import Processes, local_shard
from tiedgpt.train.objective import OWN_LOSS, Arrays, Loss, Model, body_of
from tiedgpt.train.planning import Plan

MAX_SKIPPED_STEPS, SKIP_WINDOW_STEPS = 10, 200
"""Number of skipped steps among the last `SKIP_WINDOW_STEPS` that ends a run."""
RECENT_STEPS = 100
"""Number of losses and gradient norms in a `RunState`."""
SHOWN_STEPS = 5
"""Number of losses and gradient norms in an error message."""
WORSE_RATIO = 1.01
"""Ratio to the best validation loss above which a loss counts as worse."""
STALE_EVALUATIONS = 3
"""Number of evaluations without improvement that ends a run, if the newest loss is `WORSE_RATIO`
times the best."""


Accelerate = Callable[[Model], AbstractContextManager[Any]]
"""Function that makes steps on a model faster inside its block, such as `fast_training`."""


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


@dataclass
class RunState:
    """Recent losses, skipped steps and validation scores of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_loss: float | None = None
    skipped: list[int] = field(default_factory=list)
    """Skipped steps among the last `SKIP_WINDOW_STEPS`."""
    skipped_in_all: int = 0
    """Number of skipped steps of the run."""
    best_step: int | None = None
    """Step with the best validation loss; its checkpoint is kept."""
    best_loss: float = math.inf
    stale: int = 0
    """Number of evaluations since the best."""
    newest_loss: float = math.inf
    evaluation_due: bool = False
    """Whether a stop interrupted the evaluation after the last step."""

    def to_save(self) -> dict[str, Any]:
        """Return the fields that have a value, as plain data for a checkpoint."""
        return {k: v for k, v in asdict(self).items() if v not in (None, math.inf)}

    def add_step(self, loss: float, norm: float) -> None:
        """Add the loss and the gradient norm of a step."""
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.losses = [*self.losses, loss][-RECENT_STEPS:]
        self.norms = [*self.norms, norm][-RECENT_STEPS:]

    def add_skip(self, step: int) -> None:
        """Add a skipped step."""
        self.skipped.append(step)
        self.skipped_in_all += 1

    def add_evaluation(self, step: int, loss: float) -> bool:
        """Add a validation loss; return whether it is the best so far."""
        self.newest_loss = loss
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.stale = step, loss, 0
            return True
        self.stale += 1
        return False

    def reopen(self, step: int, loss: float) -> None:
        """Add the final validation loss of a finished run that is prolonged."""
        self.add_evaluation(step, loss)
        self.stale = 0

    def is_over(self, plan: Plan) -> bool:
        """Return whether validation ends the run: out of patience, or rising again."""
        if plan.keep == "last" or not plan.can_end_early:
            return False
        if plan.patience is not None:
            return self.stale >= plan.patience
        return self.stale >= STALE_EVALUATIONS and self.newest_loss > WORSE_RATIO * self.best_loss

    def require_sound(self, step: int) -> None:
        """Raise `DivergedError` after too many skipped steps or if the mean loss has grown."""
        self.skipped = [skipped for skipped in self.skipped if skipped > step - SKIP_WINDOW_STEPS]
        if len(self.skipped) >= MAX_SKIPPED_STEPS:
            raise DivergedError(
                f"{len(self.skipped)} of the last {SKIP_WINDOW_STEPS} steps had no finite loss or "
                "gradient"
            )
        if self.first_loss is not None and len(self.losses) == RECENT_STEPS:
            mean = math.fsum(self.losses) / RECENT_STEPS
            if mean > 2 * self.first_loss + 1:
                raise DivergedError(
                    f"the mean loss of the last {RECENT_STEPS} steps is {mean:.3f}, and the first "
                    f"was {self.first_loss:.3f}"
                )

    def __str__(self) -> str:
        if not self.norms:
            return "no step was done before"
        norms = ", ".join(f"{norm:.3g}" for norm in self.norms[-SHOWN_STEPS:])
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses[-SHOWN_STEPS:])
        return f"losses before: {losses}; gradient norms before: {norms}"


def read_state(state: Mapping[str, Any]) -> tuple[RunState, Plan]:
    """Return the `RunState` and the plan in a checkpoint's state."""
    try:
        return RunState(**state["run"]), Plan(**state["plan"])
    except (KeyError, TypeError):
        raise CorruptInputError(
            "the checkpoint was written by another version of tiedgpt"
        ) from None


def find_not_finite_weights(model: Model) -> str | None:
    """Return the name of the first parameter whose local shard is not finite, or None."""
    parts = ((name, local_shard(p)) for name, p in model.named_parameters())
    return next((name for name, part in parts if not bool(part.isfinite().all())), None)


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
