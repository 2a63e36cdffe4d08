"""Train a model: from options to the published directory.

    from tiedgpt.train import TrainOptions, train

    for event in train(TrainOptions(data=("my.txt",), minutes=1), out="runs/mine"):
        print(event)

`tiedgpt train` and `tiedgpt tune` iterate the same function and draw what it yields.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError, TiedGPTError, UserError
from tiedgpt.files import missing_run
from tiedgpt.runtime import find_device
from tiedgpt.signatures import checked
from tiedgpt.train.checkpoint import require_unchanged
from tiedgpt.train.dataset import Data, Progress, Sources, prepare
from tiedgpt.train.distributed import Parallel, Processes, join_processes
from tiedgpt.train.events import AlreadyFinished, Event, Note, Planned
from tiedgpt.train.fast import fast_training
from tiedgpt.train.loop import Trainer
from tiedgpt.train.machine import cpu_threads
from tiedgpt.train.objective import Objective, check_result
from tiedgpt.train.objectives import open_objective
from tiedgpt.train.options import DURATIONS, TrainOptions
from tiedgpt.train.planning import (
    SHORT_RUN_STEPS,
    Machine,
    Plan,
    draft_plan,
    find_warnings,
    plan_run,
    prolong,
    seconds_left,
)
from tiedgpt.train.speed import measure_machine, resize
from tiedgpt.train.storage import (
    RunDirectory,
    compare_duration,
    find_run,
    make_record,
    plan_tables,
    read_plan,
)

NOTABLE_SECONDS = 5.0
"""Preparation that takes longer is reported."""


@checked
def train(
    options: TrainOptions,
    out: str | Path | None = None,
    *,
    parallel: Parallel | None = None,
    threads: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    track: Callable[[Mapping[str, Any]], None] | None = None,
    progress: Progress | None = None,
    scoring: Progress | None = None,
    began: float | None = None,
) -> Iterator[Event]:
    """Train in the directory `out`, or resume there, and yield events.

    `out` is by default the newest run in runs/ with these options, or a new one. If
    `stop_requested` returns true after a step, the run is saved and ends; the same call resumes it.
    `threads` is the number of CPU threads. `track` is called with each line of metrics.jsonl,
    `progress` with the number of encoded characters, `scoring` with the number of batches of the
    final score. The time of `minutes` runs from `began`, in seconds of `time.perf_counter`, or from
    now; at least half of it is trained.

    Raises `UserError` or `CorruptInputError` for invalid options or data, `NoRoomError` if memory
    or disk are too small, `DivergedError` if loss or weights are not finite.
    """
    called = time.perf_counter()
    began = called if began is None else began
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(join_processes(parallel, find_device(options.device)))
        objective_class, sources = processes.main_first(open_sources, options, out)
        digest = processes.on_main(sources.digest) if options.data else None
        run = processes.on_main(stack.enter_context, open_run(options, digest, out))
        if run.is_finished:
            yield AlreadyFinished(run.directory.path)
            return
        yield from _hub_notes(options)
        # the first optimizer of a process imports torch's compiler, which takes a second
        first_optimizer = Thread(target=torch.optim.AdamW, args=([torch.zeros(1, device="cpu")],))
        first_optimizer.start()
        objective, data = processes.main_first(
            prepare, objective_class, sources, run.directory, options, run.config, progress
        )
        del sources  # they may hold the text in memory
        first_optimizer.join()
        plan, deadline = run.plan, None
        if plan is None:
            if (prepared := time.perf_counter() - called) > NOTABLE_SECONDS:
                minutes, seconds = divmod(round(prepared), 60)
                yield Note(f"prepared the text in {minutes}:{seconds:02}; a resumed run reuses it")
            yield Note("measuring this machine")
            stack.enter_context(cpu_threads(threads))
            objective, data, plan, notes = plan_new_run(
                options, objective, data, processes, threads, began
            )
            record = make_record(
                options, objective.config, plan, data.counts, run.digest, processes.describe()
            )
            processes.on_main(run.directory.write_record, record)
            if plan.minutes is not None:
                now = time.perf_counter()
                deadline = now + seconds_left(60 * plan.minutes, now - began)
            yield from map(Note, notes)
        stack.enter_context(cpu_threads(threads or plan.threads))
        yield Planned(
            run.directory, options, objective, data, plan, processes.device, processes.size
        )
        yield from Trainer(
            run.directory, objective, data, plan, processes.device,
            stop_requested=stop_requested, track=track, processes=processes, deadline=deadline,
            progress=scoring, accelerate=fast_training,
        ).run()  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run's directory, and the config and the plan in its run.toml; None for a new run."""

    directory: RunDirectory
    digest: str | None
    """Digest of the data; None: the documentation of Python."""
    config: GPTConfig | None = None
    plan: Plan | None = None
    is_finished: bool = False


def open_sources(
    options: TrainOptions, out: str | Path | None = None
) -> tuple[type[Objective], Sources]:
    """Return the objective of the options and its data; raise `UserError` if `out` has others."""
    if out is not None:
        compare_options(options, out)
    objective = open_objective(options)
    sources = objective.open(options)
    check_result(objective, "open", sources, "Sources", isinstance(sources, Sources))
    return objective, sources


@contextlib.contextmanager
def open_run(options: TrainOptions, digest: str | None, out: str | Path | None) -> Iterator[Run]:
    """Lock the directory of these options on this data, and yield the run in it.

    A finished run is prolonged if the options ask for a longer duration. Raises `UserError` if the
    run has other options or other data, and `CorruptInputError` if its files were changed.
    """
    directory = RunDirectory(Path(out or find_run(options, digest)))
    with directory.lock():
        tables = directory.read_record()
        if not tables:
            yield Run(directory, digest)
            return
        factor = compare_options(options, directory.path)
        if digest != tables.get("text", {}).get("sha256"):
            raise UserError(
                f"the text has changed since {directory.path} began",
                hint="give another --out, or the same text",
            )
        config, plan = read_plan(tables)
        require_unchanged(directory, config, plan)
        if factor is not None:
            last_step = directory.read_metrics()[-1]["step"]
            plan = prolong(plan, options, last_step, factor)
            durations = {name: getattr(options, name) for name in DURATIONS}
            requested = {"options": tables["options"] | durations}
            directory.write_record({**tables, **requested, **plan_tables(plan)})
        yield Run(directory, digest, config, plan, factor is None and directory.is_finished())


def compare_options(options: TrainOptions, out: str | Path) -> float | None:
    """Raise `UserError` if the run in `out` has other options.

    Returns the factor by which a finished run is prolonged, or None.
    """
    directory = RunDirectory(Path(out))
    tables = directory.read_record()
    differences = options.differences(tables.get("options", {})) if tables else []
    factor = compare_duration(options, tables) if differences and directory.is_finished() else None
    if differences and factor is None:
        raise UserError(
            f"{out} holds a run with other options ({'; '.join(differences)})",
            hint=f"give the same options to resume, or another --out, with --start {out} to begin "
            "from its weights",
        )
    return factor


def plan_new_run(
    options: TrainOptions,
    objective: Objective,
    data: Data,
    processes: Processes,
    threads: int | None,
    began: float,
) -> tuple[Objective, Data, Plan, list[str]]:
    """Return the objective and the data of the chosen size, the plan, and notes.

    They are equal in all processes. The time of `minutes` runs from `began`.
    """
    machine, speed = measure_machine(
        options, objective, data, processes, threads=threads, accelerate=fast_training
    )
    spent = processes.broadcast(time.perf_counter() - began)
    try:
        config, plan = plan_run(options, objective.config, data, machine, seconds_spent=spent)
    except TiedGPTError as error:  # in all processes: the first reports it
        processes.leave_to_main(error.exit_code)
        raise
    if speed.compares_threads and plan.steps >= SHORT_RUN_STEPS:
        speed(config, plan)  # the number of steps was given, so no speed was measured
    plan = replace(plan, threads=threads or speed.threads)
    notes = [*speed.notes, *find_warnings(options, config, data, machine, plan)]
    return *resize(objective, data, config), plan, notes


def prepare_fresh(
    options: TrainOptions, run: RunDirectory, progress: Progress | None = None
) -> tuple[Objective, Data]:
    """Return the objective and the data of these options, encoded in a new run's directory."""
    return prepare(*open_sources(options), run, options, None, progress)


def make_plan(
    options: TrainOptions,
    objective: Objective,
    data: Data,
    device: torch.device,
    *,
    processes: Processes | None = None,
) -> Plan:
    """Return the plan to train an objective on data by these options on this machine."""
    processes = processes or Processes(device)
    machine, _ = measure_machine(options, objective, data, processes, accelerate=fast_training)
    _, plan = plan_run(options, objective.config, data, machine)
    return plan


@dataclass(frozen=True)
class DryRun:
    """The plan of a run that is not trained."""

    objective: Objective
    data: Data
    machine: Machine
    plan: Plan
    """The plan; without its number of steps where `has_steps` is false."""
    has_steps: bool
    problem: NoRoomError | None
    """The error that the run would end with."""
    tokens_per_second: float | None = None
    """Measured speed, or None before it and if the run does not fit in memory."""
    measured: str = ""
    """The part of a step that was measured; "" for whole steps."""
    warnings: Sequence[str] = ()


def dry_run(
    options: TrainOptions, *, threads: int | None = None, progress: Progress | None = None
) -> Generator[DryRun, None, None]:
    """Yield the plan of a run on this machine, then the same with its speed.

    The first has the memory already, and the number of steps if no duration decides it. There is
    one plan only if the speed decides more: the size, or on a GPU the batch and the compiling. The
    text is encoded as in `train`, in a temporary directory.
    """
    processes, problem = Processes(find_device(options.device)), None
    with tempfile.TemporaryDirectory() as temporary, cpu_threads(threads):
        objective, data = prepare_fresh(options, RunDirectory(Path(temporary) / "run"), progress)
        machine, speed = measure_machine(
            options, objective, data, processes, threads=threads, accelerate=fast_training
        )
        config, has_steps = objective.config, options.duration.unit != "minutes"
        try:
            if not options.chooses and not machine.is_gpu:
                plan = draft_plan(options, config, data, machine)
                if has_steps:
                    config, plan = plan_run(options, config, data, machine)
                yield DryRun(objective, data, machine, plan, has_steps, None)
            config, plan = plan_run(options, config, data, machine)
        except NoRoomError as error:
            problem = error
            smallest = replace(options, micro_batch=1, memory=None)
            plan = draft_plan(smallest, config, data, replace(machine, free_bytes=math.inf))
        objective, data = resize(objective, data, config)
        tokens_per_second = None if problem else speed(config, plan)
        warnings = [*speed.notes, *find_warnings(options, config, data, machine, plan)]
        has_steps = has_steps or problem is None
        yield DryRun(
            objective, data, machine, plan, has_steps, problem, tokens_per_second,
            speed.measured_part, warnings,
        )  # fmt: skip


def _hub_notes(options: TrainOptions) -> Iterator[Note]:
    """Yield a note for each model or tokenizer that is read from the hub."""
    for source in (options.tokenizer, options.start):
        if source in (None, "bpe", "char") or Path(source).exists():
            continue
        if missing_run(Path(source)) is None:
            yield Note(f"{source}: not a path, looking on the Hugging Face hub")
