"""From options to a plan: what was not set is derived, and measured where the machine decides."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError
from tiedgpt.train.memory import needed
from tiedgpt.train.optim import optimizers, parameter_groups
from tiedgpt.train.options import DEFAULT_EPOCHS, DEFAULT_MINUTES, TrainOptions
from tiedgpt.train.plan import DTYPES, Plan
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Task

MICRO_BATCH_TOKENS = 8192
EVALUATIONS = 10


def training_device() -> torch.device:
    """Return the GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_plan(options: TrainOptions, task: Task, device: torch.device) -> Plan:
    """Derive what was not set, measuring where the machine decides.

    Raises `NoRoomError` for a model that cannot fit in memory, before anything is built.
    """
    config = task.config
    batch_size = options.batch_size or options.default_batch_size()
    micro = options.micro_batch or max(1, MICRO_BATCH_TOKENS // task.row_tokens)
    micro = min(micro, batch_size)
    while True:
        try:
            require_memory(
                config,
                device,
                batch_size=batch_size,
                micro_batch=micro,
                row_tokens=task.row_tokens,
                dtype=options.dtype,
            )
            break
        except NoRoomError:
            if options.micro_batch is not None or micro == 1:
                raise
            micro //= 2
    dtype = faster_dtype(config, device) if options.dtype == "auto" else options.dtype
    draft = Plan(
        steps=options.steps or 1,
        batch_size=batch_size,
        micro_batch=micro,
        optimizer=options.rule(),
        lr=options.lr or options.default_rate(config),
        warmup=0,
        weight_decay=options.weight_decay,
        grad_clip=options.grad_clip,
        dtype=dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
        skip_limit=options.skip_limit,
        patience=options.patience,
    )
    steps = options.steps
    if steps is None and options.minutes is None and task.epoch_rows is not None:
        steps = math.ceil(DEFAULT_EPOCHS * task.epoch_rows / batch_size)
    if steps is None:
        steps = measured_steps(options.minutes or DEFAULT_MINUTES, task, draft, device)
    eval_every = max(1, min(steps // EVALUATIONS, 1000))
    return replace(
        draft,
        steps=steps,
        warmup=round(options.warmup * steps),
        eval_every=eval_every,
        eval_batches=max(4, eval_every // 20),
        save_every=max(1, min(steps // 4, 1000)),
    )


def require_memory(
    config: GPTConfig,
    device: torch.device,
    *,
    batch_size: int = 1,
    micro_batch: int = 1,
    row_tokens: int | None = None,
    dtype: str = "auto",
) -> None:
    """Raise `NoRoomError`, with the arithmetic, where a step cannot fit in memory."""
    room = _memory(device)
    rows = row_tokens or config.n_positions
    need = needed(
        config,
        batch_size=batch_size,
        micro_batch=micro_batch,
        row_tokens=rows,
        dtype=dtype,
        device=device.type,
    )
    if room is not None and need.lasting > room:
        raise NoRoomError(
            f"{config.parameter_count():,} parameters need {need.lasting / 1e9:,.1f} GB to train "
            "(weight, gradient and two moments of 4 bytes each) and "
            f"{device} has {room / 1e9:,.1f} GB free"
        )
    if room is not None and need.total > room:
        raise NoRoomError(
            f"a batch of {batch_size:,} x {rows:,} tokens, {micro_batch:,} sequences at a time, "
            f"needs about {need.passing / 1e9:,.1f} GB beside the {need.lasting / 1e9:,.1f} GB of "
            f"weights, gradients and moments, and {device} has {room / 1e9:,.1f} GB free: use a "
            "smaller --batch-size or --micro-batch"
        )


def _memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            known = dict(line.split(":") for line in file)
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


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


def measured_steps(minutes: float, task: Task, plan: Plan, device: torch.device) -> int:
    """Turn minutes into steps by timing a few steps of a throw-away model."""
    model = task.build().to(device).train()
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    optimizers_ = optimizers(groups, lr=1e-5)
    batch_of = task.batches(plan)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 4 and len(times) < 30):
        began = time.perf_counter()
        train_step(model, optimizers_, batch_of(len(times)), plan)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step = statistics.median(times[1:])
    # A forward is a third of a step; evaluations see a twentieth of it, the last all of the text.
    last = step / 3 * task.held_out_rows / plan.batch_size
    return max(1, int((minutes * 60 - last) / (step * (1 + 1 / 3 / 20))))
