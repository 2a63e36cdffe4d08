"""A learning rate found by trying: one short sweep over rising rates (Smith 2017).

L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv 1506.01186), section 3.3:
train with a rate that rises at each step, and look at where the loss falls, and where it turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tiedgpt.errors import DivergedError, UserError
from tiedgpt.train.blocks import in_training
from tiedgpt.train.optim import groups_and_optimizers, set_rate
from tiedgpt.train.schedule import Plan
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Task

LOWEST, HIGHEST = 1e-5, 1.0
STEPS = 100
SMOOTHING = 0.8
TOO_HIGH = 1.5
"""Times the first loss: there the sweep ends."""
BELOW_LOWEST = 3.0
"""The suggestion is the rate of the lowest loss divided by this."""


@dataclass(frozen=True)
class Sweep:
    """The losses of a sweep, in its order."""

    rates: list[float]
    losses: list[float]
    """Before the step at each rate."""
    smoothed: list[float]
    """Exponential means of them, without a bias at the start."""

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss was lowest."""
        return self.rates[self.smoothed.index(min(self.smoothed))]

    @property
    def suggestion(self) -> float:
        """The peak rate to try, rounded to two digits."""
        return float(f"{self.lowest / BELOW_LOWEST:.1e}")


@torch.random.fork_rng(devices=[])
def sweep(
    task: Task,
    plan: Plan,
    device: torch.device,
    *,
    steps: int = STEPS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sweep:
    """Train a model of the run's own for a few steps, the rate rising from 1e-5 to 1.

    It begins as the run would, on the run's batches, and is thrown away. It ends early where the
    loss is beyond 1.5 times the first, or no longer finite. Equal seeds give equal sweeps.
    Raises `UserError` where the loss is not finite from the beginning.
    """
    torch.manual_seed(plan.seed)
    model = in_training(task.build().train(), plan).to(device)
    task.begin(model)
    _, rules = groups_and_optimizers(task, model, plan, 0)
    batch_of = task.batches(replace(plan, batch_warmup=0, length_warmup=0))
    found = Sweep([], [], [])
    total = weight = 0.0
    for step in range(steps):
        rate = LOWEST * (HIGHEST / LOWEST) ** (step / max(1, steps - 1))
        set_rate(rules, rate)
        try:
            loss = train_step(model, rules, batch_of(step), plan, task=task).loss
        except DivergedError:
            break
        total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
        found.rates.append(rate)
        found.losses.append(loss)
        found.smoothed.append(total / weight)
        progress(step + 1, steps)
        if found.smoothed[-1] > TOO_HIGH * found.losses[0]:
            break
    if not found.rates:
        raise UserError("the loss is not finite before the first step: no rate can help")
    return found
