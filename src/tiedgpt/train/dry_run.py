"""The plan of a run that is not trained, and the parts of `train` for a loop of one's own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError
from tiedgpt.runtime import exhaust, find_device
from tiedgpt.train.distributed import Processes
from tiedgpt.train.events import Encoded, report
from tiedgpt.train.machine import cpu_threads
from tiedgpt.train.plan.draft import draft_plan
from tiedgpt.train.plan.groups import RunOptions, parse_bytes
from tiedgpt.train.plan.plan import find_warnings, plan_run
from tiedgpt.train.plan.values import Machine, Plan
from tiedgpt.train.speed import measure_machine
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.preparation import Prepared, prepare
from tiedgpt.train.tasks.publisher import Publisher
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Task, open_task


def prepare_fresh(task: Task, run: RunDirectory) -> Prepared:
    """Return a task with its data, read and encoded in a new run's directory."""
    run.path.mkdir(parents=True, exist_ok=True)
    return exhaust(prepare(task, task.read(), run, Processes(find_device(task.options.device))))


def make_plan(prepared: Prepared, processes: Processes | None = None) -> Plan:
    """Return the plan to train a task on its data on this machine; the size is given."""
    device = find_device(prepared.task.options.device)
    machine, _ = measure_machine(prepared, processes or Processes(device))
    _, plan = plan_run(prepared.task.options, prepared.config, prepared.facts, machine)
    return plan


@dataclass(frozen=True)
class DryRun:
    """The plan of a run that is not trained."""

    config: GPTConfig
    data: Data
    publisher: Publisher
    machine: Machine
    plan: Plan
    """The plan; without its number of steps where `has_steps` is false."""
    has_steps: bool
    problem: NoRoomError | None = None
    """The error that the run would end with."""
    tokens_per_second: float | None = None
    """Measured speed, or None before it and if the run does not fit in memory."""
    measured: str = ""
    """The part of a step that was measured; "" for whole steps."""
    warnings: Sequence[str] = ()


def dry_run(options: RunOptions, *, threads: int | None = None) -> Iterator[Encoded | DryRun]:
    """Yield the plan of a run on this machine, then the same with its speed.

    The first has the memory already, and the number of steps if no duration decides it. There is
    one plan only if the speed decides more: the size, or on a GPU the batch and the compiling. The
    text is encoded as in `train`, in a temporary directory, with events of its progress.
    """
    processes, problem = Processes(find_device(options.device)), None
    with tempfile.TemporaryDirectory() as temporary, cpu_threads(threads):
        task, run = open_task(options), RunDirectory(Path(temporary) / "run")
        prepared = yield from report(prepare(task, task.read(), run, processes))
        config, facts = prepared.config, prepared.facts
        machine, speed = measure_machine(prepared, processes, threads=threads)
        has_steps = options.duration.unit != "minutes"
        try:
            if not options.chooses and not machine.is_gpu:
                plan = draft_plan(options, config, facts, machine)
                if has_steps:
                    config, plan = plan_run(options, config, facts, machine)
                data = prepared.data(config)
                yield DryRun(config, data, task.publisher(config, data), machine, plan, has_steps)
            config, plan = plan_run(options, config, facts, machine)
        except NoRoomError as error:
            problem = error
            smallest = replace(options, micro_batch=1, memory=None)
            plan = draft_plan(smallest, config, facts, replace(machine, free_bytes=math.inf))
            limit = None if options.memory is None else parse_bytes(options.memory)
            plan = replace(plan, memory=limit)
        tokens_per_second = None if problem else speed(config, plan)
        data = prepared.data(config)
        warnings = [*speed.notes, *find_warnings(options, config, data, machine, plan)]
        yield DryRun(
            config, data, task.publisher(config, data), machine, plan,
            has_steps or problem is None, problem, tokens_per_second, speed.measured_part, warnings,
        )  # fmt: skip
