"""A proof on this machine that a run which was killed and resumed equals one that was not.

The same few steps are trained twice from the same options and plan, each time in processes of
their own: once through; and once in a process that kills itself and one that goes on from its last
checkpoint. Weights, optimizer, state and metrics must be the same, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tiedgpt.errors import CheckFailedError, TiedGPTError, UserError
from tiedgpt.train.checkpoint import checkpoints
from tiedgpt.train.events import Stepped
from tiedgpt.train.forking import fork_options
from tiedgpt.train.loop import train
from tiedgpt.train.measures import of_the_machine
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.plan import Plan, record, recorded
from tiedgpt.train.planning import make_plan, training_device
from tiedgpt.train.prepare import open_sources, prepare
from tiedgpt.train.run_directory import RunDirectory

PROCESSES: Any = multiprocessing.get_context("spawn")
STEPS = 6
KILLED_AFTER = 5
"""Past a checkpoint, so that steps are done twice."""
SAVE_EVERY = 2
EVAL_EVERY = 3
UNTIED_AT = 3
"""Before a checkpoint that is resumed from."""


@dataclass(frozen=True)
class Compared:
    """The sums of what both runs left, by file; of metrics.jsonl without what tells of speed."""

    unbroken: dict[str, str]
    resumed: dict[str, str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.unbroken == self.resumed


def rehearse(
    options: TrainOptions, out: Path, say: Callable[[str], None] = lambda line: None
) -> Compared:
    """Train, kill, resume and compare, in a temporary directory beside `out` that is removed.

    Raises `UserError` for what cannot be trained, `CheckFailedError` where a child process fails.
    """
    if "-" in options.data or options.val == "-":
        raise UserError("standard input can be read only once: name a file for --verify-resume")
    place = next(p for p in out.absolute().parents if p.is_dir())
    with tempfile.TemporaryDirectory(prefix=".verify-resume-", dir=place) as name:
        runs = [Path(name) / which for which in ("unbroken", "resumed")]
        plan = _plan(options, runs[0])
        (runs[1]).mkdir()
        for entry in ("data", "tokenizer", "run.toml"):
            if (runs[0] / entry).exists():
                os.symlink(runs[0] / entry, runs[1] / entry)
        say(f"unbroken: {STEPS} steps of {plan.batch_size} rows")
        _in_child(runs[0], options, None)
        say(f"killed after step {KILLED_AFTER} (SIGKILL)")
        _in_child(runs[1], options, KILLED_AFTER)
        say(f"resumed from step {KILLED_AFTER - KILLED_AFTER % SAVE_EVERY}")
        _in_child(runs[1], options, None)
        return Compared(*(_sums(RunDirectory(run)) for run in runs))


def _plan(options: TrainOptions, path: Path) -> Plan:
    """Prepare the data in a run's directory, and write its record with a plan of a few steps."""
    run = RunDirectory(path)
    asked = options if options.fork is None else fork_options(options, {})
    prepared = prepare(run, asked, open_sources(asked))
    plan = make_plan(
        replace(asked, minutes=None, steps=STEPS + 1), prepared.task, training_device()
    )
    plan = replace(
        plan,
        warmup=2,
        save_every=SAVE_EVERY,
        eval_every=EVAL_EVERY,
        eval_batches=1,
        patience=None,
        batch_warmup=STEPS if asked.batch_warmup else 0,
        length_warmup=STEPS if asked.length_warmup else 0,
        untie_at=None if plan.untie_at is None else UNTIED_AT,
    )
    run.write_record(record(options, prepared.task.config, plan, prepared.counted))
    return plan


def _in_child(path: Path, options: TrainOptions, die_after: int | None) -> None:
    """Train in a fresh process."""
    arguments = (path, options, die_after, torch.get_num_threads())
    child = PROCESSES.Process(target=_train, args=arguments)
    child.start()
    child.join()
    killed = -int(getattr(signal, "SIGKILL", 1)) if die_after is not None else 0
    if child.exitcode != killed:
        raise CheckFailedError(f"a process that trained ended with the code {child.exitcode}")


def _train(path: Path, options: TrainOptions, die_after: int | None, threads: int) -> None:
    """Go on to step `STEPS` from wherever the run stands; be killed after a step before that."""
    torch.set_num_threads(threads)
    run, done = RunDirectory(path), [0]
    tables = run.read_record()
    config, plan = recorded(tables)
    asked = options if options.fork is None else fork_options(options, tables)
    try:
        task = prepare(run, asked, open_sources(asked), config).task
        fork = Path(options.fork) / "checkpoints" if options.fork is not None else None
        for event in train(
            run,
            task,
            plan,
            training_device(),
            fork=fork,
            stop_requested=lambda: done[0] >= STEPS,
        ):
            done[0] = event.step
            if isinstance(event, Stepped) and event.step == die_after:
                _die()
    except TiedGPTError as error:
        raise SystemExit(f"{error}") from None


def _die() -> None:
    """End at once, as when the power goes: nothing is flushed, nothing is told."""
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(-1)


def _sums(run: RunDirectory) -> dict[str, str]:
    """Return the sha256 of each file of the newest checkpoint, and of the metrics."""
    newest = checkpoints(run.checkpoints)[-1]
    names = ("model.safetensors", "optimizer.safetensors", "state.json")
    sums = {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in names}
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    kept = [{k: v for k, v in line.items() if not of_the_machine(k)} for line in lines]
    return sums | {"metrics.jsonl": hashlib.sha256(json.dumps(kept).encode()).hexdigest()}
