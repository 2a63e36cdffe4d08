"""How fast this machine trains, by a few steps of a throw-away model."""

from __future__ import annotations

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

MEASURED = 0.01
"""Of the time: so long a size is measured, if its steps are not longer."""
FOR_STEPS = 0.5
"""Of the time, at least, whatever the last evaluation takes."""
SAMPLE_SHARE = 0.1
"""Rows of the fixed sample that is scored between steps, of those trained on in the meantime."""


def step_seconds(
    objective: Objective, data: Data, plan: Plan, world: World, *, seconds: float
) -> float:
    """Return how long a step takes, by steps for so many seconds, in all processes.

    It is the lower quartile of many: a busy moment of the machine makes some of them longer.
    """
    model = world.place(prepare_blocks(objective.build().train(), plan))
    rules = world.optimizers(make_optimizers(objective, model, replace(plan, lr=1e-5), 0)[1])
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


def measure_steps(
    minutes: float, objective: Objective, data: Data, plan: Plan, world: World
) -> int:
    """Return how many steps, with the evaluations between and after them, take so long."""
    step = step_seconds(objective, data, plan, world, seconds=min(4.0, 2 * MEASURED * minutes * 60))
    # A forward is a third of a step; evaluations, by one process, see a tenth of what is trained
    # on, the last one all of the text.
    forward = step / 3 * world.size
    last = forward * data.held_out_rows / plan.batch_size
    return max(1, int(for_steps(minutes, last) / (step + forward * SAMPLE_SHARE)))


def for_steps(minutes: float, last: float) -> float:
    """Return the seconds for steps, beside the `last` of the evaluation at the end."""
    return max(60 * minutes - last, FOR_STEPS * 60 * minutes)
