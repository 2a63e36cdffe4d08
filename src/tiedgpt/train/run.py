"""Train a model from options to the published directory.

    from tiedgpt.train import TrainOptions, train

    for event in train(TrainOptions(data=("my.txt",), minutes=1), out="runs/mine"):
        print(event)

`tiedgpt train` and `tiedgpt tune` iterate the same function and draw what it yields.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import TiedGPTError
from tiedgpt.files import missing_run
from tiedgpt.runtime import find_device
from tiedgpt.signatures import checked
from tiedgpt.train.distributed import Parallel, Processes, join_processes
from tiedgpt.train.events import AlreadyFinished, Event, Note, Planned, report
from tiedgpt.train.loop import Trainer
from tiedgpt.train.machine import cpu_threads
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.plan.plan import SHORT_RUN_STEPS, find_warnings, plan_run
from tiedgpt.train.plan.time import Clock, seconds_left
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.speed import measure_machine
from tiedgpt.train.store.directory import make_record
from tiedgpt.train.store.run import Run, compare_options, open_run
from tiedgpt.train.tasks.preparation import Prepared, prepare
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import open_task, try_task

NOTABLE_SECONDS = 5.0
"""Preparation that takes longer is reported."""


@checked
def train(
    options: RunOptions,
    out: str | Path | None = None,
    *,
    parallel: Parallel | None = None,
    threads: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    began: float | None = None,
) -> Iterator[Event]:
    """Train in the directory `out`, or resume there, and yield events.

    `out` is by default the newest run in runs/ with these options, or a new one. If
    `stop_requested` returns true after a step, the run is saved and ends; the same call resumes it.
    `threads` is the number of CPU threads. The time of `minutes` runs from `began`, in seconds of
    `time.perf_counter`, or from now; at least half of it is trained.

    Raises `UserError` or `CorruptInputError` for invalid options or data, `NoRoomError` if memory
    or disk are too small, `DivergedError` if loss or weights are not finite.
    """
    called = time.perf_counter()
    began = called if began is None else began
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(join_processes(parallel, find_device(options.device)))
        if out is not None:
            processes.on_main(compare_options, options, out)
        task = processes.main_first(open_task, options)
        sources = processes.main_first(task.read)
        digest = processes.on_main(sources.digest) if options.data else None
        opened = processes.on_main(stack.enter_context, open_run(options, digest, out))
        if opened.is_finished:
            yield AlreadyFinished(opened.directory.path)
            return
        yield from map(Note, _note_hub_names(options))
        with _imported_optimizers():
            run, directory = opened.run, opened.directory
            steps = prepare(task, sources, directory, processes, run.config if run else None)
            prepared = yield from report(steps)
        del sources, steps  # they may hold the text in memory
        deadline = None
        if run is None:
            if (seconds := time.perf_counter() - called) > NOTABLE_SECONDS:
                took = f"{round(seconds) // 60}:{round(seconds) % 60:02}"
                yield Note(f"prepared the text in {took}; a resumed run reuses it")
            yield Note("measuring this machine")
            stack.enter_context(cpu_threads(threads))
            config, plan, data, notes = plan_new_run(prepared, processes, threads, began)
            run, table = Run(directory, config, plan), processes.describe()
            record = make_record(options, config, plan, data.counts, digest, table)
            processes.on_main(directory.write_record, record)
            if plan.minutes is not None:
                now = time.perf_counter()
                deadline = now + seconds_left(60 * plan.minutes, now - began)
            yield from map(Note, notes)
        else:
            data = prepared.data(run.config)
        stack.enter_context(cpu_threads(threads or run.plan.threads))
        publisher = task.publisher(run.config, data)
        yield Planned(
            directory, options, run.config, data, run.plan, publisher, processes.device,
            processes.size,
        )  # fmt: skip
        clock = Clock(deadline=deadline)
        yield from Trainer(
            task, data, run, processes, stop_requested=stop_requested, clock=clock
        ).run()


@contextlib.contextmanager
def _imported_optimizers() -> Iterator[None]:
    """Import torch's compiler meanwhile, which a process's first optimizer does for a second."""
    first_optimizer = Thread(target=torch.optim.AdamW, args=([torch.zeros(1, device="cpu")],))
    first_optimizer.start()
    try:
        yield
    finally:
        first_optimizer.join()


def plan_new_run(
    prepared: Prepared, processes: Processes, threads: int | None, began: float
) -> tuple[GPTConfig, Plan, Data, list[str]]:
    """Return the config of the model, the plan, the rows, and notes, equal in all processes.

    The time of `minutes` runs from `began`.
    """
    options, config, facts = prepared.task.options, prepared.config, prepared.facts
    if isinstance(options, TrainOptions) and options.objective is not None:
        processes.on_main(try_task, prepared.task, config, prepared.data(config), processes.device)
    machine, speed = measure_machine(prepared, processes, threads=threads)
    spent = processes.broadcast(time.perf_counter() - began)
    try:
        config, plan = plan_run(options, config, facts, machine, seconds_spent=spent)
    except TiedGPTError as error:  # in all processes: the first reports it
        processes.leave_to_main(error.exit_code)
        raise
    if speed.compares_threads and plan.steps >= SHORT_RUN_STEPS:
        speed(config, plan)  # the number of steps was given, so no speed was measured
    plan = replace(plan, threads=threads or speed.threads)
    data = prepared.data(config)
    warnings = find_warnings(options, config, data, machine, plan)
    return config, plan, data, [*speed.notes, *warnings]


def _note_hub_names(options: RunOptions) -> Iterator[str]:
    """Yield a note for each model or tokenizer that is read from the hub."""
    for source in dict.fromkeys((options.tokenizer_source, options.start)):
        if source in (None, "char") or Path(source).exists():
            continue
        if missing_run(Path(source)) is None:
            yield f"{source}: not a path, looking on the Hugging Face hub"
