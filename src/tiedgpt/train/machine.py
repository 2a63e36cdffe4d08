"""The machine that trains: its device, its memory, its speed, and measurements of training steps.

The speed is measured in a few steps before the training. During the training, the norms of W's two
gradients, the FLOP/s utilization and the peak memory are measured. Keys of metrics.jsonl
that begin with `machine_` or end in `_per_second` depend on the machine and its load; all others
are equal whenever a run is repeated.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import re
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import DivergedError, UserError
from tiedgpt.runtime import count_cores, free_memory, has_bf16
from tiedgpt.train.dataset import Data
from tiedgpt.train.distributed import Processes
from tiedgpt.train.objective import Model, Objective, body_of, predicts_tokens, try_objective
from tiedgpt.train.optim.groups import make_optimizers
from tiedgpt.train.options import DEFAULT_MINUTES, TrainOptions, format_count
from tiedgpt.train.planning import Dtype, Machine, Plan
from tiedgpt.train.step import Accelerate, find_missing, prepare_blocks, train_step
from tiedgpt.weights.parameters import head_matrix

MEASURE_TIME_SHARE = 0.005
"""Share of --minutes that one measurement of the speed takes, if its steps are not longer."""
MAX_MEASURE_SECONDS = 4.0
SLOW_FACTOR = 10
"""With slow steps, a measurement takes at most this multiple of its duration, and one step."""
COMPILE_SECONDS = 2.0
"""Seconds for which the first step may load libraries and compile kernels."""
MIN_MEASURED_STEPS, MAX_MEASURED_STEPS = 4, 60
MEASURED_FLOPS = 1e12
"""Maximum number of operations in a measured step, which limits its rows; it has at least one."""
BUSY_PROCESSES = 0.5
"""A machine is busy if its running processes exceed its cores by more than this number."""
LIBRARY_BYTES = 60_000_000
"""Memory of the libraries that the first step loads."""
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 operations per second by part of NVIDIA's device name; the first match counts."""
MEASURE_EVERY_STEPS = 10
"""Steps between measurements; the first step is measured, too."""


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
    """Return the number of processes that want to run if it exceeds the cores, else None."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load > count_cores() + BUSY_PROCESSES else None


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None changes nothing."""
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
    load = measure_load() if processes.size == 1 and device.type == "cpu" else None
    minutes = options.duration.amount if options.duration.unit == "minutes" else DEFAULT_MINUTES
    seconds = min(MAX_MEASURE_SECONDS, 60 * MEASURE_TIME_SHARE * minutes)

    def measure(config: GPTConfig, plan: Plan) -> float:
        resized = resize(objective, data, config)
        return measure_speed(*resized, plan, processes, seconds, load, accelerate)

    compares_threads = load is not None and threads is None and torch.get_num_threads() > 1
    speed = SpeedMeasurement(measure, data.unit, load, compares_threads=compares_threads)
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
        n_processes=processes.size,
        n_shards=processes.n_shards,
    )
    if options.objective is not None:
        processes.on_main(try_objective, objective, data, device)
    return machine, speed


@dataclass
class SpeedMeasurement:
    """Tokens (or examples) per second of a config and a plan; each plan is measured once."""

    measure: Callable[[GPTConfig, Plan], float]
    unit: str
    load: float | None
    """Number of processes that want to run on a busy machine."""
    compares_threads: bool = field(default=False, kw_only=True)
    """Whether the first measurement compares one thread with the default number."""
    threads: int | None = field(default=None, init=False)
    """The number of threads that the comparison chose."""
    notes: list[str] = field(default_factory=list, init=False)
    measured: list[tuple[GPTConfig, Plan, float]] = field(default_factory=list, init=False)

    def __call__(self, config: GPTConfig, plan: Plan) -> float:
        """Return the speed of all processes together."""
        for known_config, known_plan, speed in self.measured:
            if (known_config, known_plan) == (config, plan):
                return speed
        self.measured.append((config, plan, self._compare_threads(config, plan)))
        return self.measured[-1][-1]

    def _compare_threads(self, config: GPTConfig, plan: Plan) -> float:
        """Return the speed, on a busy machine with the better number of threads."""
        if not self.compares_threads:
            if self.load is not None and not self.notes:
                self.notes.append(
                    f"this machine is busy ({self.load:.1f} processes on {count_cores()} cores): "
                    "the measured speed may not last, and the plan follows the clock"
                )
            with cpu_threads(self.threads):
                return self.measure(config, plan)
        self.compares_threads = False
        speeds = {}
        for threads in (1, torch.get_num_threads()):
            with cpu_threads(threads):
                speeds[threads] = self.measure(config, plan)
        self.threads = max(speeds, key=lambda threads: speeds[threads])
        (other,) = speeds.keys() - {self.threads}
        self.notes.append(
            f"this machine is busy ({self.load:.1f} processes on {count_cores()} cores): training "
            f"with {format_count(self.threads, 'thread')}, at {speeds[self.threads]:,.0f} "
            f"{self.unit}/s instead of {speeds[other]:,.0f} with {other}; --threads N decides "
            "otherwise"
        )
        return speeds[self.threads]


def measure_speed(
    objective: Objective,
    data: Data,
    plan: Plan,
    processes: Processes,
    seconds: float,
    load: float | None = None,
    accelerate: Accelerate = nullcontext,
) -> float:
    """Train a model with fresh weights for some seconds; return the speed of a typical step.

    The lower quartile ignores moments in which another program ran. On a busy machine, which has
    a `load`, these are typical, and the median counts.
    """
    durations = list[float]()
    row_flops = 6.0 * objective.config.parameter_count() * data.row_tokens
    rows = min(plan.batch_size, max(processes.size, int(MEASURED_FLOPS / row_flops)))
    plan = replace(plan, batch_size=rows, micro_batch=min(plan.micro_batch, rows))
    model = processes.place(prepare_blocks(objective.build().train(), plan))
    is_sharded = processes.n_shards > 1
    slow = replace(plan, lr=1e-5)
    _, optimizers = make_optimizers(objective, model, slow, is_sharded=is_sharded)
    batch_of = data.batches(plan.batch_size, plan.seed)

    def is_enough() -> bool:
        if len(durations) == 1:
            return durations[0] > SLOW_FACTOR * seconds + COMPILE_SECONDS
        spent = sum(durations[1:])
        if spent > SLOW_FACTOR * seconds:
            return True
        is_typical = spent >= seconds and len(durations) >= MIN_MEASURED_STEPS
        return is_typical or len(durations) >= MAX_MEASURED_STEPS

    while not durations or not is_enough():
        began = time.perf_counter()
        batch = batch_of(len(durations))
        with contextlib.suppress(DivergedError), accelerate(model):  # a run skips the step, too
            train_step(model, optimizers, batch, plan, processes, objective=objective)
        if processes.device.type == "cuda":
            torch.cuda.synchronize()
        durations.append(processes.broadcast(time.perf_counter() - began))
    later = durations[1:] or durations
    step = statistics.median(later)
    if load is None and len(later) > 2:
        step = statistics.quantiles(later, n=4)[0]
    return plan.batch_size * data.row_units / step


def resize(objective: Objective, data: Data, config: GPTConfig) -> tuple[Objective, Data]:
    """Return the objective and the data for the model of a config."""
    if config == objective.config:
        return objective, data
    if config.n_positions != objective.config.n_positions:
        data = data.with_context(config.n_positions)
    return replace(objective, config=config), data


# Measurements of training steps


def is_due(step: int) -> bool:
    """Return whether a step, counted from 1, is measured."""
    return step == 1 or step % MEASURE_EVERY_STEPS == 0


class Measures:
    """Measurements of every `MEASURE_EVERY_STEPS`-th step, as additional metrics of the step."""

    def __init__(
        self, model: Model, data: Data, dtype: str, device: torch.device, n_processes: int
    ) -> None:
        self._device, self._n_processes = device, n_processes
        self._norms = GradientNorms(model)
        peak = peak_flops(device, dtype) if data.unit == "tokens" else None
        self._peak_share = model_flops(model, data.row_tokens) / peak if peak else None

    def watching(self, step: int) -> AbstractContextManager[None]:
        """Measure the gradients of a step, counted from 1, if it is due.

        With several processes, none of them has the whole gradient, and nothing is measured.
        """
        if is_due(step) and self._n_processes == 1:
            return self._norms.watching()
        return contextlib.nullcontext()

    def metrics(self, step: int, units_per_second: float) -> dict[str, float]:
        """Return the measurements of a step, or {} if none was due."""
        if not is_due(step):
            return {}
        metrics = self._norms.metrics()
        if self._peak_share is not None:
            metrics["machine_flops_use"] = units_per_second / self._n_processes * self._peak_share
        if (peak := peak_memory(self._device)) is not None:
            metrics["machine_memory_bytes"] = peak
        return metrics


class GradientNorms:
    """Norms of W's two gradients, from reading and from predicting, in one backward pass.

    dL/dW is the sum of a gradient from reading (each token of the batch adds to its row) and a
    dense gradient from predicting. The first is dL/d(output of the embedding), summed by id; the
    second is the difference. In an untied model, W only reads, and the second norm is the head's.
    """

    def __init__(self, model: Model) -> None:
        self._gpt = body_of(model)
        self._predicts = predicts_tokens(model)
        self._read: list[tuple[Tensor, Tensor]] = []
        self._norms: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the training step inside the block, which starts without gradients."""
        self._read, self._norms = [], {}
        wte, head = self._gpt.wte, self._gpt.head
        hooks: dict[Tensor, Callable[[Tensor], None]] = {wte.weight: self._measure_w}
        matrix = head_matrix(head) if head is not None and self._predicts else None
        if matrix is not None:
            hooks[matrix] = self._measure_head
        with contextlib.ExitStack() as stack:
            stack.enter_context(wte.register_forward_hook(self._watch_output))
            for weight, hook in hooks.items():
                if weight.requires_grad:
                    stack.enter_context(weight.register_post_accumulate_grad_hook(hook))
            yield
        self._read = []

    def metrics(self) -> dict[str, float]:
        """Return the norms before clipping, by key of metrics.jsonl; {} if W is frozen."""
        return {name: float(norm) for name, norm in sorted(self._norms.items())}

    def _watch_output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(self._add_read, inputs[0].flatten()))

    def _add_read(self, ids: Tensor, gradient: Tensor) -> None:
        self._read.append(_sum_by_id(ids, gradient.flatten(0, -2)))

    def _measure_w(self, matrix: Tensor) -> None:
        """Measure W's accumulated gradient after a micro-batch."""
        if not self._read or matrix.grad is None:
            return
        ids, read = _sum_by_id(*(torch.cat(tensors) for tensors in zip(*self._read, strict=True)))
        self._read = [(ids, read)]
        self._norms["grad_norm_w_input"] = torch.linalg.vector_norm(read)
        if self._predicts and self._gpt.head is None:
            rows = matrix.grad[ids]
            matrix.grad[ids] = rows - read
            self._norms["grad_norm_w_output"] = torch.linalg.vector_norm(matrix.grad)
            matrix.grad[ids] = rows  # the same bits as before

    def _measure_head(self, matrix: Tensor) -> None:
        if matrix.grad is not None:
            self._norms["grad_norm_w_output"] = torch.linalg.vector_norm(matrix.grad)


def _sum_by_id(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rows (N, D) of equal ids (N,); return the ids (U,) and the sums (U, D)."""
    unique, indices = torch.unique(ids, return_inverse=True)
    sums = rows.new_zeros(len(unique), rows.shape[1])
    if rows.is_cuda:  # each device has one function with a fixed order of addition
        return unique, sums.index_put_((indices,), rows, accumulate=True)
    return unique, sums.index_add_(0, indices, rows)


def model_flops(model: Model, n_positions: int) -> float:
    """Return the floating-point operations of training on a token: 6 N + 12 L D T.

    N counts the parameters that a token is multiplied with: W only if it predicts, and no positions
    (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B).
    """
    gpt = body_of(model)
    n = sum(parameter.numel() for parameter in model.parameters()) - gpt.wpe.weight.numel()
    if not predicts_tokens(model) or gpt.head is not None:
        n -= gpt.wte.weight.numel()
    return 6.0 * n + 12.0 * gpt.config.n_layer * gpt.config.n_embd * n_positions


@functools.lru_cache
def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak operations per second: from NVIDIA's data sheet, or measured on a CPU.

    Returns None for an unknown GPU.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        matches = [flops for model, flops in PEAK_FLOPS.items() if model in name]
        return matches[0] if matches and dtype == "bf16" else None
    n = 1024
    x = torch.ones(n, n, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, device=device)
    seconds = min(timeit.repeat(functools.partial(F.linear, x, x), number=1, repeat=5))
    return 2.0 * n**3 / seconds


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process on the device, or None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe() -> dict[str, Any]:
    """Return facts about the hardware for run.toml."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name\s*: *(.+)", text, re.MULTILINE)
    facts: dict[str, Any] = {
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": count_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
