"""How fast this machine trains, by a few steps of a throw-away model."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace

import torch

from tiedgpt.train.blocks import prepare_blocks
from tiedgpt.train.objective import Data, Objective
from tiedgpt.train.optim import make_optimizers
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Plan
from tiedgpt.train.step import train_step

MEASURED = 0.005
"""Of the time: so long a size is measured, if its steps are not longer."""
SAMPLE_SHARE = 0.05
"""Rows of the fixed sample that is scored between steps, of those trained on in the meantime. A
forward is a third of a step, so this is 1.7 % of the time."""
FINAL_SHARE = 0.02
"""Of the time, that the last evaluation may take."""
PAUSE_SHARE, PAUSE_SECONDS = 0.02, 0.2
"""Of the time, that samples and checkpoints may take, and the seconds that are reckoned for both: a
sample of `tiny` takes 0.05."""
CLOSING_SECONDS = 1.0
"""For the model, its card and the end of the program."""
CHECKS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the steps, or of the time, at which the plan is held against the clock."""
BUSY = 0.5
"""More processes that want to run than there are cores make a busy machine."""


def step_seconds(
    objective: Objective, data: Data, plan: Plan, world: World, *, seconds: float
) -> float:
    """Return how long a step takes, by steps for so many seconds, in all processes.

    It is the lower quartile of many: a busy moment of the machine makes some of them longer.
    """
    model = world.place(prepare_blocks(objective.build().train(), plan))
    rules = world.optimizers(make_optimizers(objective, model, replace(plan, lr=1e-5))[1])
    batch_of = data.batches(plan.batch_size, plan.seed)
    times: list[float] = []

    def passed() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    while len(times) < 4 or (sum(times) < seconds and len(times) < 60):
        began = time.perf_counter()
        train_step(model, rules, batch_of(len(times)), plan, world, objective=objective)
        times.append(world.on_main(passed))
    return statistics.quantiles(times[1:], n=4)[0]


def count_steps(seconds: float, a_step: float, data: Data, plan: Plan, n_processes: int = 1) -> int:
    """Return how many steps, with the evaluations between and after them, take so long."""
    forward = a_step / 3 * n_processes  # of as many rows as a step has: one process evaluates
    last = forward * count_final_rows(seconds, a_step, data, plan) / plan.batch_size
    closing = min(CLOSING_SECONDS, seconds / 10)
    return max(1, int((seconds - last - closing) / (a_step + forward * SAMPLE_SHARE)))


def count_evaluations(minutes: float, at_most: int) -> int:
    """Return how many times a run of so many minutes may stop to be scored and to write."""
    return max(1, min(at_most, round(60 * minutes * PAUSE_SHARE / PAUSE_SECONDS)))


def count_final_rows(seconds: float, a_step: float, data: Data, plan: Plan) -> float:
    """Return how many rows the last evaluation of a run of so many seconds scores."""
    rows = FINAL_SHARE * seconds / (a_step / 3) * plan.batch_size
    return min(data.held_out_rows, max(rows, 4.0 * plan.micro_batch))


def busy_note() -> str:
    """Return what is to be said of a machine that others use at the same time, or ""."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < cores + BUSY:
        return ""
    return (
        f"this machine is busy: {load:.1f} processes want its {cores} cores; what is measured now "
        "may not hold, and the plan follows the clock"
    )


class Checks:
    """When the plan of a run with a time is held against the clock, and how fast it went since.

    `deadline` is in seconds of `time.perf_counter`. A run that goes on has its share of the time.
    """

    def __init__(self, plan: Plan, step: int, deadline: float | None) -> None:
        assert plan.minutes is not None
        now, self._whole = time.perf_counter(), 60 * plan.minutes
        share = step / plan.steps
        self.deadline = now + self._whole * (1 - share) if deadline is None else deadline
        self._since = step, now
        self._left = [check for check in CHECKS if check > share]

    def measure(self, plan: Plan, step: int, now: float) -> float | None:
        """Return the seconds that a step took since the last check, where one is due."""
        done = max(step / plan.steps, 1 - (self.deadline - now) / self._whole)
        at, began = self._since
        if not self._left or done < self._left[0] or step == at:
            return None
        self._left = [check for check in self._left if check > done]
        self._since = step, now
        return (now - began) / (step - at)
