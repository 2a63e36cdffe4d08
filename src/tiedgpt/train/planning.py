"""From options to a plan: what was not set is derived, and measured where the machine decides."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.infer.room import free_memory
from tiedgpt.train.compiling import decide
from tiedgpt.train.memory import needed, parse_bytes, said, taken
from tiedgpt.train.optim import optimizers, parameter_groups
from tiedgpt.train.options import DEFAULT_EPOCHS, DEFAULT_MINUTES, TrainOptions
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import DTYPES, Plan
from tiedgpt.train.recomputing import Recompute, in_training
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Task

MICRO_BATCH_TOKENS = 8192
EVALUATIONS = 10
MANY = 1000
"""Steps, of which shares are whole numbers."""


def training_device() -> torch.device:
    """Return the GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_plan(
    options: TrainOptions, task: Task, device: torch.device, *, world: World | None = None
) -> Plan:
    """Derive what was not set, measuring where the machine decides.

    Raises `NoRoomError` for a model that cannot fit in memory, before anything is built. In a
    `world` of several processes all must call this, and get the same.
    """
    world = world or World(device)
    draft = world.lead(lambda: drafted(options, task, device, world))
    world.lead(lambda: world.require_work(replace(draft, **scheduled(options, MANY))))
    steps, batch_size = options.steps, draft.batch_size
    if steps is None and options.minutes is None and task.epoch_rows is not None:
        steps = math.ceil(DEFAULT_EPOCHS * task.epoch_rows / batch_size)
    if steps is None:
        steps = measured_steps(options.minutes or DEFAULT_MINUTES, task, draft, world)
        steps = round(steps / growing_share(options, draft, task.row_units))
    eval_every = max(1, min(steps // EVALUATIONS, 1000))
    return replace(
        draft,
        steps=steps,
        **scheduled(options, steps),
        eval_every=eval_every,
        eval_batches=max(4, eval_every // 20),
        save_every=max(1, min(steps // 4, 1000)),
    )


def drafted(options: TrainOptions, task: Task, device: torch.device, world: World) -> Plan:
    """Return a plan of which all is decided but the number of steps, and what depends on it."""
    config = task.config
    if options.untie_at is not None:
        require_tied(config)
        config = replace(config, tie_word_embeddings=False)  # as it will be
    batch_size = options.batch_size or options.default_batch_size()
    fitted(options, config, device, batch_size, task.row_tokens, world)  # before a product is timed
    dtype = faster_dtype(config, device) if options.dtype == "auto" else options.dtype
    micro, recompute = fitted(options, config, device, batch_size, task.row_tokens, world, dtype)
    one_shape = task.unit == "tokens" and not options.length_warmup
    compiles, _ = decide(options.compile, device, one_shape=one_shape)
    return Plan(
        steps=options.steps or 1,
        batch_size=batch_size,
        micro_batch=micro,
        optimizer=options.rule(),
        lr=options.lr or options.default_rate(config),
        warmup=0,
        weight_decay=(
            options.default_weight_decay() if options.weight_decay is None else options.weight_decay
        ),
        grad_clip=options.grad_clip,
        dtype=dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
        skip_limit=options.skip_limit,
        patience=options.patience,
        schedule=options.schedule,
        memory=None if options.memory is None else parse_bytes(options.memory),
        recompute=recompute,
        compile="on" if compiles else "off",
    )


def fitted(
    options: TrainOptions,
    config: GPTConfig,
    device: torch.device,
    batch_size: int,
    row_tokens: int,
    world: World,
    dtype: str = "bf16",
) -> tuple[int, Recompute]:
    """Return how many sequences go at a time and what is recomputed: the fastest that fits.

    Fewer at a time come first, which costs little; then recomputing, about a third of a step.
    """
    at_most = options.micro_batch or max(1, MICRO_BATCH_TOKENS // row_tokens)
    micro = min(world.share(batch_size), at_most)
    sizes = [micro >> n for n in range(1 if options.micro_batch else micro.bit_length())]
    ways: tuple[Recompute, ...] = ("off",) if options.memory is None else ("off", "blocks")
    if options.recompute != "auto":
        ways = (options.recompute,)
    for recompute, size in itertools.product(ways, sizes):
        try:
            require_memory(
                config,
                device,
                batch_size=batch_size,
                micro_batch=size,
                row_tokens=row_tokens,
                dtype=dtype,
                recompute=recompute,
                optimizer=options.rule(),
                budget=None if options.memory is None else parse_bytes(options.memory),
                world=world,
            )
            return size, recompute
        except NoRoomError as error:
            refused = error
    raise refused


def memory_line(plan: Plan, config: GPTConfig, row_tokens: int, world: World) -> str:
    """Return in words what a plan with a budget takes beside the program itself, by formula."""
    assert plan.memory is not None
    if plan.untie_at is not None:
        config = replace(config, tie_word_embeddings=False)  # as it will be
    need = needed(
        config,
        batch_size=plan.batch_size,
        micro_batch=plan.micro_batch,
        row_tokens=row_tokens,
        dtype=plan.dtype,
        device=world.device.type,
        recompute=plan.recompute,
        optimizer=plan.optimizer,
        processes=world.size,
        holders=world.holders,
    )
    how = ", blocks computed again in backward" if plan.recompute == "blocks" else ""
    return (
        f"about {said(need.total)} beside the program, of {said(plan.memory)}: "
        f"{plan.micro_batch:,} sequences at a time{how}"
    )


def require_tied(config: GPTConfig) -> None:
    """Raise `UserError` for a model that --untie-at asks to untie again."""
    if not config.tie_word_embeddings:
        raise UserError("--untie-at: the model to begin with has a head of its own already")


def scheduled(options: TrainOptions, steps: int) -> dict[str, Any]:
    """Return the fields of a plan of so many steps that options give as shares of them."""
    warmup = round(options.warmup * steps)
    untie_at = options.untie_at
    return {
        "warmup": warmup,
        "cooldown": min(round(options.cooldown * steps), steps - warmup)
        if options.schedule == "wsd"
        else 0,
        "batch_warmup": round(options.batch_warmup * steps),
        "length_warmup": round(options.length_warmup * steps),
        "untie_at": None if untie_at is None else min(round(untie_at * steps), steps - 1),
    }


def growing_share(options: TrainOptions, draft: Plan, row_units: int) -> float:
    """Return what share of the tokens of whole batches the steps see, as batch and rows grow."""
    plan = replace(draft, steps=MANY, **scheduled(options, MANY))
    return plan.growth(row_units).units_before(MANY) / (MANY * plan.batch_size * row_units)


def require_memory(
    config: GPTConfig,
    device: torch.device,
    *,
    batch_size: int = 1,
    micro_batch: int = 1,
    row_tokens: int | None = None,
    dtype: str = "auto",
    recompute: Recompute = "off",
    optimizer: str = "adamw",
    budget: int | None = None,
    world: World | None = None,
) -> None:
    """Raise `NoRoomError`, with the arithmetic, where a step cannot fit in memory."""
    world = world or World(device)
    room, has, ways = _memory(device), "free", ["a smaller --batch-size or --micro-batch"]
    ways += ["--recompute blocks"] if recompute == "off" else []
    if room is not None and device.type == "cpu" and world.neighbours > 1:
        room, has = room // world.neighbours, "free for each process"
    if budget is not None:
        own = taken(device)
        if own >= budget:
            raise NoRoomError(f"--memory {said(budget)}: the program alone takes about {said(own)}")
        if room is None or budget - own < room:
            room, has = budget - own, f"of --memory {said(budget)} left beside the program"
            ways.append("more --memory")
    rows = row_tokens or config.n_positions
    need = needed(
        config,
        batch_size=batch_size,
        micro_batch=micro_batch,
        row_tokens=rows,
        dtype=dtype,
        device=device.type,
        recompute=recompute,
        optimizer=optimizer,
        processes=world.size,
        holders=world.holders,
    )
    if room is not None and need.lasting > room:
        raise NoRoomError(
            f"{config.parameter_count():,} parameters need {said(need.lasting)} to train (weights, "
            f"gradients and the optimizer's moments) and {device} has {said(room)} {has}"
        )
    if room is not None and need.total > room:
        raise NoRoomError(
            f"a batch of {batch_size:,} x {rows:,} tokens, {micro_batch:,} sequences at a time, "
            f"needs about {said(need.passing)} beside the {said(need.lasting)} of weights, "
            f"gradients and moments, and {device} has {said(room)} {has}: use {', or '.join(ways)}"
        )


def _memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory()


def faster_dtype(config: GPTConfig, device: torch.device) -> str:
    """Return "bf16" where a product of the MLP's shape is faster in it than in fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    seconds = {}
    for name, dtype in DTYPES.items():
        x = torch.randn(1024, config.n_embd, dtype=dtype, device=device)
        w = torch.randn(config.inner_dim, config.n_embd, dtype=dtype, device=device)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            F.linear(x, w)
            times.append(time.perf_counter() - began)
        seconds[name] = min(times)
    return "bf16" if seconds["bf16"] < 0.8 * seconds["fp32"] else "fp32"


def measured_steps(minutes: float, task: Task, plan: Plan, world: World) -> int:
    """Turn minutes into steps by timing a few steps of a throw-away model, in all processes."""
    model = world.place(in_training(task.build().train(), plan))
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    rules = world.optimizers(optimizers(groups, lr=1e-5))
    batch_of = task.batches(plan)
    times: list[float] = []

    def seconds() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    while len(times) < 3 or (sum(times) < 4 and len(times) < 30):
        began = time.perf_counter()
        train_step(model, rules, batch_of(len(times)), plan, world)
        times.append(world.lead(seconds))
    step = statistics.median(times[1:])
    # A forward is a third of a step; evaluations, by one process, see a twentieth of it, the last
    # all of the text.
    forward = step / 3 * world.size
    last = forward * task.held_out_rows / plan.batch_size
    return max(1, int((minutes * 60 - last) / (step + forward / 20)))
