"""How much memory training takes: measured in a throw-away model, a few rows at a time.

It is asked before the first step: a CPU that runs out of memory raises no error, the system ends
the process. Weights, gradients and moments are counted before anything is built.
"""

from __future__ import annotations

import contextlib
import gc
import math
from dataclasses import dataclass, replace

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import DivergedError, NoRoomError
from tiedgpt.infer.room import free_memory
from tiedgpt.train.blocks import in_training
from tiedgpt.train.measures import TensorMemory, held_memory
from tiedgpt.train.optim import groups_and_optimizers
from tiedgpt.train.parallel import World
from tiedgpt.train.schedule import Plan
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Task

PLAIN = 100_000_000
"""A row's share is known once rows added this much, or once all other rows add less than this."""
HEAP = 1.2
"""Resident memory over the bytes that tensors take on a CPU: malloc keeps freed blocks that are too
small for the next request. Six models, 6 to 22 million parameters, took 0.93 to 1.27 of them."""


def said(size: float) -> str:
    """Return bytes as they are read: 340 MB, 2.5 GB."""
    return f"{size / 1e6:,.0f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def free(device: torch.device) -> float:
    """Return the free bytes of a device; infinitely many where the system does not tell."""
    found = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return math.inf if found is None else found


@dataclass(frozen=True)
class Peak:
    """The most bytes that a process of its own holds as it trains, the program included."""

    before: int
    """Held before any of it."""
    fixed: int
    """Whatever the rows are."""
    a_row: float
    """More for each row that is computed at a time, the longest that there may be."""

    def of(self, rows: int) -> int:
        """Return the peak of so many rows at a time."""
        return self.fixed + int(rows * self.a_row)


def measure_peak(task: Task, plan: Plan, at_most: int, device: torch.device) -> Peak:
    """Train a throw-away model on one row, two, four, until it is plain what a row takes.

    The bytes of its tensors are counted, so the result does not depend on what the process did
    before. Raises `NoRoomError` where a GPU has no room for one row.
    """
    gc.collect()
    before, room = held_memory(device), free(device)
    memory, per_byte = TensorMemory(device), 1.0 if device.type == "cuda" else HEAP
    plan = replace(plan, compile="off", lr=1e-9)
    with memory.counting():
        model = in_training(task.build().train(), plan).to(device)
        _, rules = groups_and_optimizers(task, model, plan, 0)
    fewer = less = most = peak = 0
    scale, a_row = 1.0, 0.0
    for rows in (1, *sorted({min(1 << n, at_most) for n in range(at_most.bit_length() + 1)})):
        plan = replace(plan, batch_size=rows, micro_batch=rows)
        batch = task.batches(plan)(0)
        scale = task.row_tokens / batch[0][0].size
        try:
            with memory.counting(), contextlib.suppress(DivergedError):
                train_step(model, rules, batch, plan, task=task)
        except torch.OutOfMemoryError:
            if most == 0:
                raise NoRoomError(f"{device} has no room for one row of the batch") from None
            break
        if most == 0:  # the first step loads libraries, which belong to the program
            before = max(before, held_memory(device) - memory.peak)
        fewer, less, most, peak = most, peak, rows, int(memory.peak * per_byte)
        added = peak - less if most > fewer > 0 else 0
        a_row = added / (most - fewer) if added else 0.0
        others = a_row * (at_most - most)
        if added > PLAIN or (fewer > 1 and others < PLAIN) or peak + 2 * added > room:
            break
    return Peak(before, before + int(peak - most * a_row), scale * a_row)


def _lasting(config: GPTConfig, plan: Plan, trained: int | None) -> int:
    """Return the bytes of weights, and of gradients and moments of those that are trained."""
    if plan.untie_at is not None:
        config = replace(config, tie_word_embeddings=False)  # as it will be
    count = config.parameter_count()
    in_matrices = 12 * config.n_layer * config.n_embd * config.n_embd
    moments = 8 * count - (4 * in_matrices if plan.optimizer == "muon" else 0)
    return 8 * count + moments if trained is None else 4 * count + 12 * trained


def require_lasting(
    config: GPTConfig, plan: Plan, row_tokens: int, world: World, trained: int | None = None
) -> None:
    """Raise `NoRoomError` where weights and a batch cannot fit, before anything is built."""
    room, has = _room(plan, world, held_memory(world.device))
    lasting = _lasting(config, plan, trained) // world.n_shards
    if lasting > room:
        raise NoRoomError(
            f"{config.parameter_count():,} parameters need {said(lasting)} to train (weights, "
            f"gradients and the optimizer's moments) and {world.device} has {said(room)} {has}",
            hint="use a smaller model",
        )
    batch = 4 * 8 * plan.batch_size * row_tokens
    if lasting + batch > room:
        raise NoRoomError(
            f"a batch of {plan.batch_size:,} x {row_tokens:,} tokens takes {said(batch)} beside "
            f"{said(lasting)} of weights, gradients and moments, and {world.device} has "
            f"{said(room)} {has}",
            hint="use a smaller --batch-size",
        )


def require_memory(
    config: GPTConfig,
    plan: Plan,
    row_tokens: int,
    peak: Peak,
    world: World,
    trained: int | None = None,
) -> None:
    """Raise `NoRoomError`, with the arithmetic, where a step cannot fit in memory.

    The peak is that of one process. Of several each has one part in `world.n_shards` of what lasts,
    or, as DDP, all of it and the gradients twice.
    """
    room, has = _room(plan, world, peak.before)
    lasting, need = _lasting(config, plan, trained), peak.of(plan.micro_batch) - peak.before
    need -= lasting - lasting // world.n_shards
    if world.size > world.n_shards:
        need += 4 * (config.parameter_count() if trained is None else trained)
    if plan.micro_batch < world.share(plan.batch_size):
        need += 4 * config.vocab_size * config.n_embd  # W's gradient of a part, beside the sum
    if need <= room:
        return
    ways = ["a smaller --batch-size or --micro-batch"]
    ways += ["--recompute blocks"] if plan.recompute == "off" else []
    ways += ["more --memory"] if plan.memory is not None else []
    raise NoRoomError(
        f"a batch of {plan.batch_size:,} x {row_tokens:,} tokens, {plan.micro_batch:,} sequences "
        f"at a time, needs about {said(need)}, {said(lasting // world.n_shards)} of them for "
        f"weights, gradients and moments, and {world.device} has {said(room)} {has}",
        hint=f"use {', or '.join(ways)}",
    )


def _room(plan: Plan, world: World, before: int) -> tuple[float, str]:
    """Return the bytes that training may take beside the `before` of the program, and of what."""
    device = world.device
    room, has = free(device) + held_memory(device) - before, "free"
    if device.type == "cpu" and world.n_local > 1:
        room, has = room / world.n_local, "free for each process"
    if plan.memory is None or room <= plan.memory - before:
        return room, has
    if plan.memory <= before:
        raise NoRoomError(f"--memory {said(plan.memory)}: the program alone takes {said(before)}")
    return plan.memory - before, f"of --memory {said(plan.memory)} left beside the program"


def memory_line(plan: Plan) -> str:
    """Return in words how a plan with a budget keeps to it."""
    how = ", blocks computed again in backward" if plan.recompute == "blocks" else ""
    return f"{plan.micro_batch:,} sequences at a time{how}, to stay in {said(plan.memory or 0)}"
