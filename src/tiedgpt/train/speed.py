"""The speed of training on this machine, measured in a few steps before the training.

A step that takes long is measured in part: fewer rows, fewer blocks and, of texts, fewer tokens in
a row. Its time is extrapolated by the number of operations.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import DivergedError
from tiedgpt.files import format_count
from tiedgpt.runtime import count_cores, free_memory
from tiedgpt.train.distributed import Processes
from tiedgpt.train.machine import (
    LIBRARY_BYTES,
    choose_dtype,
    cpu_threads,
    measure_load,
    used_memory,
)
from tiedgpt.train.plan.options import DEFAULT_MINUTES
from tiedgpt.train.plan.values import Facts, Machine, Plan
from tiedgpt.train.step.blocks import find_missing, training_layers
from tiedgpt.train.step.loss import Model, body_of
from tiedgpt.train.step.measures import model_flops, peak_flops
from tiedgpt.train.step.optim.groups import make_optimizers
from tiedgpt.train.step.step import train_step
from tiedgpt.train.tasks.preparation import Prepared
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Task

MEASURE_TIME_SHARE = 0.005
"""Share of --minutes that one measurement of the speed takes, if its steps are not longer."""
MAX_MEASURE_SECONDS = 4.0
SLOW_FACTOR = 10
"""With slow steps, a measurement takes at most this multiple of its duration, and two steps."""
MAX_SLOW_SECONDS = 5.0
"""Seconds after which no further slow step is measured."""
EXPECTED_COMPILE_SECONDS = 30.0
"""Seconds that torch.compile takes for the blocks, before it has been measured."""
MIN_MEASURED_STEPS, MAX_MEASURED_STEPS = 4, 60
MEASURED_FLOPS, MEASURED_PEAK_SECONDS = 1e12, 1.0
"""Maximum number of operations in a measured step, and of seconds for them at the CPU's peak."""
STEP_FIELDS = ("batch_size", "micro_batch", "optimizer", "dtype", "memory", "recompute", "compile")
"""Fields of a plan on which the speed of its steps depends."""
MIN_MEASURED_TOKENS = 64
"""Tokens in a row below which rows are not shortened."""


def measure_machine(
    prepared: Prepared, processes: Processes, *, threads: int | None = None
) -> tuple[Machine, SpeedMeasurement]:
    """Return the machine as a plan sees it, and the measurement of its speed.

    All processes must call this, and get equal numbers.
    """
    device, options = processes.device, prepared.task.options
    load = measure_load() if processes.size == 1 and device.type == "cpu" else None
    minutes = options.duration.amount if options.duration.unit == "minutes" else DEFAULT_MINUTES
    seconds = min(MAX_MEASURE_SECONDS, 60 * MEASURE_TIME_SHARE * minutes)

    def measure(config: GPTConfig, plan: Plan) -> Measurement:
        data = prepared.data(config)
        return measure_speed(prepared.task, config, data, plan, processes, seconds, load)

    compares_threads = load is not None and threads is None and torch.get_num_threads() > 1
    speed = SpeedMeasurement(measure, load, compares_threads=compares_threads)
    free, used = processes.broadcast((free_memory(device), used_memory(device)))
    if device.type == "cpu":
        free = None if free is None else (free - LIBRARY_BYTES) // processes.n_local
        used += LIBRARY_BYTES
    machine = Machine(
        tokens_per_second=speed,
        device=str(device),
        dtype=choose_dtype(device),
        free_bytes=math.inf if free is None else free,
        used_bytes=used,
        threads=threads,
        missing_compiler=find_missing(device),
        compile_seconds=lambda: speed.compile_seconds,
        n_processes=processes.size,
        n_shards=processes.n_shards,
    )
    return machine, speed


@dataclass(frozen=True)
class Measurement:
    """The result of training for some seconds."""

    tokens_per_second: float
    """Tokens (or examples) per second of all processes together."""
    part: str = ""
    """The part of a step that was measured; "" for whole steps."""
    seconds: float = 0.0
    """Duration of the measurement."""


@dataclass
class SpeedMeasurement:
    """Tokens (or examples) per second of a config and a plan; a kind of step is measured once."""

    measure: Callable[[GPTConfig, Plan], Measurement]
    load: float | None
    """Number of processes that want to run on a busy machine."""
    compares_threads: bool = field(default=False, kw_only=True)
    """Whether the first measurement compares one thread with the default number."""
    threads: int | None = field(default=None, init=False)
    """The number of threads that the comparison chose."""
    compile_seconds: float = field(default=EXPECTED_COMPILE_SECONDS, init=False)
    """Seconds of the first measurement with compiled blocks, most of them for compiling."""
    has_compiled: bool = field(default=False, init=False)
    """Whether compiled blocks have been measured."""
    notes: list[str] = field(default_factory=list, init=False)
    measured: dict[tuple[object, ...], float] = field(default_factory=dict, init=False)
    measured_part: str = field(default="", init=False)
    """The part of a step that was measured last; "" for whole steps."""

    def __call__(self, config: GPTConfig, plan: Plan) -> float:
        """Return the speed of all processes together."""
        key = (config, *(getattr(plan, name) for name in STEP_FIELDS))
        if key not in self.measured:
            result = self._compare_threads(config, plan)
            self.measured[key], self.measured_part = result.tokens_per_second, result.part
            if plan.compile == "on" and not self.has_compiled:
                self.compile_seconds, self.has_compiled = result.seconds, True
        return self.measured[key]

    def _compare_threads(self, config: GPTConfig, plan: Plan) -> Measurement:
        """Return the speed, on a busy machine with the better number of threads."""
        if not self.compares_threads:
            if self.load is not None and not self.notes:
                self.notes.append(
                    f"{self._describe_load()}: the measured speed may not last, and the plan "
                    "follows the clock"
                )
            with cpu_threads(self.threads):
                return self.measure(config, plan)
        self.compares_threads = False
        results = {}
        for threads in (1, torch.get_num_threads()):
            with cpu_threads(threads):
                results[threads] = self.measure(config, plan)
        speeds = {threads: result.tokens_per_second for threads, result in results.items()}
        self.threads = max(speeds, key=lambda threads: speeds[threads])
        (other,) = speeds.keys() - {self.threads}
        self.notes.append(
            f"{self._describe_load()}: training with {format_count(self.threads, 'thread')}, "
            f"which is {speeds[self.threads] / speeds[other]:.1f} times as fast as {other}; "
            "--threads N decides otherwise"
        )
        return results[self.threads]

    def _describe_load(self) -> str:
        cores = format_count(count_cores(), "core")
        return f"this machine is busy ({self.load:.1f} processes on {cores})"


def measure_speed(
    task: Task,
    config: GPTConfig,
    data: Data,
    plan: Plan,
    processes: Processes,
    seconds: float,
    load: float | None = None,
) -> Measurement:
    """Train a model with fresh weights for some seconds; return the speed of a typical step.

    The lower quartile ignores moments in which another program ran. On a busy machine, which has
    a `load`, these are typical, and the median counts.
    """
    start = time.perf_counter()
    model = task.build(config, data).train()
    sample = take_part(model, data, plan, *_limit_flops(plan, processes, load))
    model = processes.place(model)
    measured = replace(plan, batch_size=sample.rows, micro_batch=min(plan.micro_batch, sample.rows))
    _, optimizers = make_optimizers(
        model, replace(measured, lr=1e-5), is_sharded=processes.n_shards > 1
    )
    batch_of = data.batches(sample.rows, plan.seed)
    spent, steps = list[float](), list[float]()
    slow = min(SLOW_FACTOR * seconds, MAX_SLOW_SECONDS)

    def is_enough() -> bool:
        # The first step may have loaded libraries and compiled kernels: it is not counted.
        is_typical = sum(spent[1:]) >= seconds and len(spent) >= MIN_MEASURED_STEPS
        return is_typical or sum(spent[1:]) > slow or len(spent) >= MAX_MEASURED_STEPS

    def now() -> float:
        if processes.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with training_layers(model, plan):
        while not spent or not is_enough():
            began, batch = now(), batch_of(len(spent))
            if sample.n_tokens < data.row_tokens:
                batch = tuple(rows[:, : sample.n_tokens] for rows in batch)
            with contextlib.suppress(DivergedError):  # a run skips the step, too
                inside = [] if sample.text else optimizers
                train_step(model, inside, batch, measured, processes, objective=task)
            times = [now() - began]
            for optimizer in optimizers if sample.text else ():
                began = now()
                optimizer.step()
                times.append((now() - began) * sample.count_updates(optimizer))
            times = processes.broadcast(times)
            spent.append(sum(times))
            steps.append(times[0] * sample.n_passes + sum(times[1:]))
    later = steps[1:] or steps
    step = statistics.median(later)
    if load is None and len(later) > 2:
        step = statistics.quantiles(later, n=4)[0]
    speed = plan.batch_size * data.row_units / step
    return Measurement(speed, sample.text, processes.broadcast(time.perf_counter() - start))


def _limit_flops(plan: Plan, processes: Processes, load: float | None) -> tuple[float, int]:
    """Return the most operations of a measured step, and its least rows, or 0 for a part of one.

    Only one process on a CPU measures less than a row of the whole model. A GPU measures whole
    micro-batches: a part would not fill it.
    """
    if processes.device.type == "cuda":
        return MEASURED_FLOPS, processes.size * plan.micro_batch
    if processes.size > 1 or processes.device.type != "cpu":
        return MEASURED_FLOPS, processes.size
    peak = peak_flops(processes.device, plan.dtype) or math.inf
    share = count_cores() / (load or count_cores())
    return min(MEASURED_FLOPS, MEASURED_PEAK_SECONDS * peak * share), 0


@dataclass(frozen=True)
class StepPart:
    """The part of a step that is measured."""

    rows: int
    n_tokens: int
    """Number of tokens in a row."""
    n_passes: float
    """Operations of forward and backward of the step over those of the part."""
    blocks: set[int]
    """Ids of the parameters of the part's blocks."""
    blocks_ratio: float
    """Number of the model's blocks over that of the part's."""
    text: str
    """The part in words; "" for a whole step."""

    def count_updates(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the number of parameters of the whole model over that of the part."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        in_blocks = sum(p.numel() for p in parameters if id(p) in self.blocks)
        return 1 + (self.blocks_ratio - 1) * in_blocks / sum(p.numel() for p in parameters)


def take_part(model: Model, data: Facts, plan: Plan, limit: float, least_rows: int = 0) -> StepPart:
    """Remove blocks from a model whose rows take more operations than the limit; return the part.

    With `least_rows`, as for several processes or a GPU, rows and blocks stay whole.
    """
    gpt, n_tokens = body_of(model), data.row_tokens
    n_blocks, n_rows = len(gpt.h), plan.batch_size

    def row_flops() -> float:
        return model_flops(model, n_tokens) * n_tokens

    whole_flops = n_rows * row_flops()
    while not least_rows and len(gpt.h) > 1 and row_flops() > limit:
        gpt.h = gpt.h[: len(gpt.h) // 2]
    shortest = n_tokens if least_rows or data.text_tokens is None else MIN_MEASURED_TOKENS
    while n_tokens >= 2 * shortest and row_flops() > limit:
        n_tokens //= 2
    rows = min(n_rows, max(1, least_rows, int(limit / row_flops())))
    parts = {"row": (rows, n_rows), "block": (len(gpt.h), n_blocks)}
    parts |= {"token": (n_tokens, data.row_tokens)}
    texts = [f"{n:,} of {format_count(of, noun)}" for noun, (n, of) in parts.items() if n < of]
    return StepPart(
        rows=rows,
        n_tokens=n_tokens,
        n_passes=whole_flops / (rows * row_flops()),
        blocks={id(parameter) for parameter in gpt.h.parameters()},
        blocks_ratio=n_blocks / len(gpt.h),
        text=", ".join(texts),
    )
