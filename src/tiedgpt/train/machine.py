"""The machine that trains: its device, its memory, and its speed, measured in a few steps."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.runtime import count_cores, free_memory, has_bf16
from tiedgpt.train.blocks import find_missing, prepare_blocks
from tiedgpt.train.dataset import Data
from tiedgpt.train.distributed import Processes
from tiedgpt.train.objective import Objective
from tiedgpt.train.optim.groups import make_optimizers
from tiedgpt.train.options import DEFAULT_MINUTES, TrainOptions, format_count
from tiedgpt.train.planning import Dtype, Machine, Plan
from tiedgpt.train.step import Accelerate, train_step

MEASURE_TIME_SHARE = 0.005
"""Share of --minutes that one measurement of the speed takes, if its steps are not longer."""
MAX_MEASURE_SECONDS = 4.0
SLOW_FACTOR = 10
"""A measurement with slow steps takes at most so many times its duration, and one step."""
COMPILE_SECONDS = 2.0
"""Seconds for which the first step may load libraries and compile kernels."""
MIN_MEASURED_STEPS, MAX_MEASURED_STEPS = 4, 60
MEASURED_FLOPS = 1e12
"""A measured step has no more rows than this number of operations allows; at least one."""
BUSY_PROCESSES = 0.5
"""A machine is busy with so many more running processes than cores."""
LIBRARY_BYTES = 60_000_000
"""Memory of the libraries that the first step loads."""


def training_device(name: str = "auto") -> torch.device:
    """Return the device of that name; auto: the GPU if available, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here: {reason}") from None


def choose_dtype(device: torch.device) -> Dtype:
    """Return the dtype of matmuls: bf16 where the device computes in it. The load has no effect."""
    return "bf16" if has_bf16(device) else "fp32"


def used_memory(device: torch.device) -> int:
    """Return the bytes that this process holds on the device, or 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def measure_load() -> float | None:
    """Return the number of processes that want to run if they are more than the cores."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load > count_cores() + BUSY_PROCESSES else None


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Compute with so many threads inside the block; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_machine(
    options: TrainOptions,
    objective: Objective,
    data: Data,
    processes: Processes,
    *,
    threads: int | None = None,
    accelerate: Accelerate = nullcontext,
) -> tuple[Machine, SpeedMeasurement]:
    """Return the machine as a plan sees it, and the measurement of its speed.

    Measured steps run inside `accelerate(model)`. All processes must call this, and get equal
    numbers.
    """
    device = processes.device
    load = processes.on_main(measure_load) if processes.size == 1 and device.type == "cpu" else None
    minutes = options.duration.amount if options.duration.unit == "minutes" else DEFAULT_MINUTES
    seconds = min(MAX_MEASURE_SECONDS, 60 * MEASURE_TIME_SHARE * minutes)
    speed = SpeedMeasurement(objective, data, processes, seconds, load, accelerate)
    free = processes.on_main(free_memory, device)
    if free is not None and device.type == "cpu":
        free = (free - LIBRARY_BYTES) // processes.n_local
    used = used_memory(device) + (LIBRARY_BYTES if device.type == "cpu" else 0)
    if load is not None and threads is None and torch.get_num_threads() > 1:
        speed.compares_threads = True
    machine = Machine(
        tokens_per_second=speed,
        device=str(device),
        dtype=choose_dtype(device),
        free_bytes=math.inf if free is None else free,
        used_bytes=processes.broadcast(used),
        threads=threads,
        missing_compiler=find_missing(device),
        n_processes=processes.size,
        n_shards=processes.n_shards,
    )
    return machine, speed


@dataclass
class SpeedMeasurement:
    """Tokens per second of a config and a plan, by a few steps of a model with fresh weights."""

    objective: Objective
    data: Data
    processes: Processes
    seconds: float
    """Duration of one measurement."""
    load: float | None
    """Number of processes that want to run on a busy machine."""
    accelerate: Accelerate = nullcontext
    compares_threads: bool = field(default=False, kw_only=True)
    """Whether the first measurement compares one thread with the default number."""
    threads: int | None = field(default=None, init=False)
    """The number of threads that the comparison chose."""
    notes: list[str] = field(default_factory=list, init=False)

    def __call__(self, config: GPTConfig, plan: Plan) -> float:
        """Return the tokens (or examples) per second of all processes."""
        if not self.compares_threads:
            if self.load is not None and not self.notes:
                self.notes.append(
                    f"this machine is busy ({self.load:.1f} processes on {count_cores()} cores): "
                    "the measured speed may not last, and the plan follows the clock"
                )
            with cpu_threads(self.threads):
                return self._measure(config, plan)
        self.compares_threads = False
        speeds = {}
        for threads in (1, torch.get_num_threads()):
            with cpu_threads(threads):
                speeds[threads] = self._measure(config, plan)
        self.threads = max(speeds, key=lambda threads: speeds[threads])
        (other,) = speeds.keys() - {self.threads}
        self.notes.append(
            f"this machine is busy ({self.load:.1f} processes on {count_cores()} cores): training "
            f"with {format_count(self.threads, 'thread')}, at {speeds[self.threads]:,.0f} "
            f"{self.data.unit}/s instead of {speeds[other]:,.0f} with {other}; --threads N decides "
            "otherwise"
        )
        return speeds[self.threads]

    def _measure(self, config: GPTConfig, plan: Plan) -> float:
        """Train for some seconds; return the speed of a typical step.

        The lower quartile ignores moments in which another program ran. On a busy machine these
        are typical, and the median counts.
        """
        processes, seconds = self.processes, list[float]()
        objective, data = resize(self.objective, self.data, config)
        row_flops = 6.0 * config.parameter_count() * data.row_tokens
        rows = min(plan.batch_size, max(processes.size, int(MEASURED_FLOPS / row_flops)))
        plan = replace(plan, batch_size=rows, micro_batch=min(plan.micro_batch, rows))
        model = processes.place(prepare_blocks(objective.build().train(), plan))
        is_sharded = processes.n_shards > 1
        slow = replace(plan, lr=1e-5)
        _, optimizers = make_optimizers(objective, model, slow, is_sharded=is_sharded)
        batch_of = data.batches(plan.batch_size, plan.seed)

        def measure_step() -> float:
            if processes.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        def is_enough() -> bool:
            if len(seconds) == 1:
                return seconds[0] > SLOW_FACTOR * self.seconds + COMPILE_SECONDS
            spent = sum(seconds[1:])
            if spent > SLOW_FACTOR * self.seconds:
                return True
            is_typical = spent >= self.seconds and len(seconds) >= MIN_MEASURED_STEPS
            return is_typical or len(seconds) >= MAX_MEASURED_STEPS

        while not seconds or not is_enough():
            began = time.perf_counter()
            batch = batch_of(len(seconds))
            with self.accelerate(model):
                train_step(model, optimizers, batch, plan, processes, objective=objective)
            seconds.append(processes.on_main(measure_step))
        later = seconds[1:] or seconds
        step = statistics.median(later)
        if self.load is None and len(later) > 2:
            step = statistics.quantiles(later, n=4)[0]
        return plan.batch_size * data.row_units / step


def resize(objective: Objective, data: Data, config: GPTConfig) -> tuple[Objective, Data]:
    """Return the objective and the data for the model of a config."""
    if config == objective.config:
        return objective, data
    if config.n_positions != objective.config.n_positions:
        data = data.with_context(config.n_positions)
    return replace(objective, config=config), data
