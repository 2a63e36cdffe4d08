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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tiedgpt.errors import CheckFailedError, TiedGPTError, UserError
from tiedgpt.train.checkpoint import checkpoints, verify
from tiedgpt.train.events import Stepped
from tiedgpt.train.measures import of_the_machine
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.plan import make_plan, record, recorded, training_device
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.schedule import Plan
from tiedgpt.train.sources import fork_options, open_sources, prepare
from tiedgpt.train.trainer import Trainer

PROCESSES: Any = multiprocessing.get_context("spawn")
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process at once by either
STEPS = 6
KILLED_AFTER = 5
"""Past a checkpoint, so that steps are done twice."""
SAVE_EVERY = 2
EVAL_EVERY = 3
UNTIED_AT = 3
"""Before a checkpoint that is resumed from."""


def check_resume(
    options: TrainOptions, out: Path, say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, str], dict[str, str]]:
    """Train, kill and resume, in a temporary directory beside `out` that is removed.

    Returns what the unbroken and the resumed run left, as `left` does. Raises `UserError` for what
    cannot be trained, `CheckFailedError` where a child process fails.
    """
    if "-" in options.data or options.val == "-":
        raise UserError(
            "standard input can be read only once", hint="name a file for --verify-resume"
        )
    place = next(p for p in out.absolute().parents if p.is_dir())
    with tempfile.TemporaryDirectory(prefix=".verify-resume-", dir=place) as name:
        unbroken, resumed = (Path(name) / which for which in ("unbroken", "resumed"))
        plan = _plan(options, RunDirectory(unbroken))
        resumed.mkdir()
        for entry in ("data", "tokenizer", "run.toml"):
            (resumed / entry).symlink_to(unbroken / entry)
        say(f"unbroken: {STEPS} steps of {plan.batch_size} rows")
        _in_child(unbroken, options, None)
        say(f"killed after step {KILLED_AFTER} (SIGKILL)")
        _in_child(resumed, options, KILLED_AFTER)
        say(f"resumed from step {KILLED_AFTER - KILLED_AFTER % SAVE_EVERY}")
        _in_child(resumed, options, None)
        return left(unbroken), left(resumed)


def left(run: Path) -> dict[str, str]:
    """Return the sha256 of each file of the newest checkpoint, and of the metrics."""
    manifest = verify(checkpoints(run / "checkpoints")[-1])
    metrics = json.dumps(repeatable_metrics(run)).encode()
    sums = {name: known["sha256"] for name, known in manifest.items()}
    return sums | {"metrics.jsonl": hashlib.sha256(metrics).hexdigest()}


def repeatable_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what tells of the machine and the moment."""
    lines = RunDirectory(run).metric_lines()
    return [{k: v for k, v in line.items() if not of_the_machine(k)} for line in lines]


def _plan(options: TrainOptions, run: RunDirectory) -> Plan:
    """Prepare the data in a run's directory, and write its record with a plan of a few steps."""
    asked = fork_options(options, {})
    task = prepare(run, asked, open_sources(asked))
    few = replace(asked, minutes=None, epochs=None, steps=STEPS + 1)
    plan = make_plan(few, task, training_device(options.device))
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
    run.write_record(record(options, task.config, plan, task.counted))
    return plan


def _in_child(run: Path, options: TrainOptions, die_after: int | None) -> None:
    """Train in a fresh process."""
    arguments = (run, options, die_after, torch.get_num_threads())
    child = PROCESSES.Process(target=_train, args=arguments)
    child.start()
    child.join()
    if abs(child.exitcode) != (0 if die_after is None else KILL):
        raise CheckFailedError(f"a process that trained ended with the code {child.exitcode}")


def _train(path: Path, options: TrainOptions, die_after: int | None, threads: int) -> None:
    """Go on to step `STEPS` from wherever the run stands; be killed after a step before that."""
    torch.set_num_threads(threads)
    run = RunDirectory(path)
    tables = run.read_record()
    config, plan = recorded(tables)
    asked = fork_options(options, tables)
    fork = Path(options.fork) / "checkpoints" if options.fork is not None else None
    try:
        task = prepare(run, asked, open_sources(asked), config)
        trainer = Trainer(run, task, plan, training_device(options.device), fork=fork)
        trainer.stop_requested = lambda: trainer.step >= STEPS
        for event in trainer.run():
            if isinstance(event, Stepped) and event.step == die_after:
                os.kill(os.getpid(), KILL)
    except TiedGPTError as error:
        raise SystemExit(f"{error}") from None
