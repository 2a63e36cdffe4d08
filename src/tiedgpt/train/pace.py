"""How fast this machine trains, by a few steps of a throw-away model."""

from __future__ import annotations

import statistics
import time
import timeit
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from tiedgpt.core.config import GPTConfig
from tiedgpt.train.blocks import in_training
from tiedgpt.train.objective import Task
from tiedgpt.train.optim import groups_and_optimizers
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Dtype, Plan
from tiedgpt.train.step import train_step

MEASURED = 0.01
"""Of the time: so long a size is measured, if its steps are not longer."""
FOR_STEPS = 0.5
"""Of the time, at least, whatever the last evaluation takes."""
SAMPLE_SHARE = 0.1
"""Rows of the fixed sample that is scored between steps, of those trained on in the meantime."""
DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def faster_dtype(config: GPTConfig, device: torch.device) -> Dtype:
    """Return "bf16" where a matmul of the MLP's shape is faster in it than in fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    seconds = {}
    for name, dtype in DTYPES.items():
        x = torch.randn(1024, config.n_embd, dtype=dtype, device=device)
        w = torch.randn(config.inner_dim, config.n_embd, dtype=dtype, device=device)
        seconds[name] = min(timeit.repeat(partial(F.linear, x, w), number=1, repeat=5))
    return "bf16" if seconds["bf16"] < 0.8 * seconds["fp32"] else "fp32"


def step_seconds(task: Task, plan: Plan, world: World, *, seconds: float) -> float:
    """Return how long a step takes, by steps for so many seconds, in all processes.

    It is the lower quartile of many: a busy moment of the machine makes some of them longer.
    """
    model = world.place(in_training(task.build().train(), plan))
    rules = world.optimizers(groups_and_optimizers(task, model, replace(plan, lr=1e-5), 0)[1])
    batch_of = task.batches(plan)
    times: list[float] = []

    def passed() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    while len(times) < 4 or (sum(times) < seconds and len(times) < 60):
        began = time.perf_counter()
        train_step(model, rules, batch_of(len(times)), plan, world, task=task)
        times.append(world.on_main(passed))
    return statistics.quantiles(times[1:], n=4)[0]


def measure_steps(minutes: float, task: Task, plan: Plan, world: World) -> int:
    """Return how many steps, with the evaluations between and after them, take so long."""
    step = step_seconds(task, plan, world, seconds=min(4.0, 2 * MEASURED * minutes * 60))
    # A forward is a third of a step; evaluations, by one process, see a tenth of what is trained
    # on, the last one all of the text.
    forward = step / 3 * world.size
    last = forward * task.held_out_rows / plan.batch_size
    return max(1, int(for_steps(minutes, last) / (step + forward * SAMPLE_SHARE)))


def for_steps(minutes: float, last: float) -> float:
    """Return the seconds for steps, beside the `last` of the evaluation at the end."""
    return max(60 * minutes - last, FOR_STEPS * 60 * minutes)
