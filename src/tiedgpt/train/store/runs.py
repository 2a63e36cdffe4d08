"""The runs in a folder: their names, the run of some options, and summaries. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiedgpt.errors import TiedGPTError
from tiedgpt.train.plan.groups import AUTO, DURATIONS, RunOptions
from tiedgpt.train.plan.options import TuneOptions
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.metrics import History, read_history
from tiedgpt.train.tasks.registry import find_record

RUNS = Path("runs")


def name_run(options: RunOptions) -> str:
    """Return the name of the data, with -SIZE, -TASK or -tuned; plays/*.txt is named plays."""
    first = options.data[0] if options.data else "python-docs"
    stem = "stdin" if first == "-" else Path(os.path.abspath(first.split("*")[0])).stem
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).strip("-.") or "data"
    suffix = options.run_suffix
    return name if suffix == AUTO else f"{name}-{suffix}"


def find_run(options: RunOptions, digest: str | None) -> Path:
    """Return the run under runs/ of these options on this data: NAME-1, NAME-2, ...

    The newest run with the same options comes first, then a finished run that these options
    prolong, then a new one. `digest` is that of the data.
    """
    name = name_run(options)
    numbered = {n: path for path in RUNS.glob(f"{name}-*") if (n := _number(path, name))}
    longer = None
    for _, path in sorted(numbered.items(), reverse=True):
        run = RunDirectory(path)
        tables = _tables(run)
        if not run.record.exists() and not run.is_in_use():
            return path  # what an attempt left that never came to its first step
        if not tables or tables.get("text", {}).get("sha256") != digest:
            continue
        if not options.differences(tables.get("options", {})):
            return path
        if longer is None and compare_duration(options, tables) and run.is_finished():
            longer = path
    return longer or RUNS / f"{name}-{max(numbered, default=0) + 1}"


def find_tune_start(options: TuneOptions, runs: Iterable[Path]) -> str | None:
    """Return the start model of the newest tuned run with these options, or None."""
    records = [run / "run.toml" for run in runs if (run / "run.toml").exists()]
    for record in sorted(records, key=os.path.getmtime, reverse=True):
        tables = _tables(RunDirectory(record.parent))
        then = tables.get("options", {})
        if then.get("recipe") == "tune" and "start" in then:
            same = replace(options, start=then["start"])
            if not same.differences(then) or compare_duration(same, tables):
                return str(then["start"])
    return None


def _tables(run: RunDirectory) -> dict[str, Any]:
    """Return the tables of run.toml, or {} if it is missing, damaged or unreadable."""
    try:
        return run.read_record()
    except TiedGPTError:
        return {}


def _number(path: Path, name: str) -> int:
    ending = path.name.removeprefix(f"{name}-")
    return int(ending) if re.fullmatch(r"[1-9]\d{0,8}", ending) else 0


def compare_duration(options: RunOptions, tables: dict[str, Any]) -> float | None:
    """Return the factor by which options prolong a recorded run; None if more differs."""
    then = tables.get("options", {})
    as_then = replace(options, **{name: then.get(name) for name in DURATIONS})
    if as_then.differences(then):
        return None
    before, now = as_then.duration, options.duration
    is_longer = before.unit == now.unit and now.amount > before.amount
    return now.amount / before.amount if is_longer else None


@dataclass(frozen=True)
class RunSummary:
    """The progress of a run."""

    path: Path
    task: str
    history: History
    steps: int | None
    """Planned number of steps, or None without a record."""
    changed: float
    """Time of the last change, in seconds since 1970."""


def list_runs(folder: Path, skip: Callable[[TiedGPTError], None]) -> Iterator[RunSummary]:
    """Yield the runs in a folder that have a metrics.jsonl, the newest last.

    `skip` is called with the error of a run that cannot be read.
    """
    files = [file for file in folder.glob("*/metrics.jsonl") if file.exists()]  # no dangling link
    for changed, path in sorted((file.stat().st_mtime, file.parent) for file in files):
        try:
            tables, history = RunDirectory(path).read_record(), read_history(path)
        except TiedGPTError as error:
            skip(error)
            continue
        options, steps = tables.get("options", {}), tables.get("training", {}).get("steps")
        task = str(options.get("objective") or options.get("task", "lm"))
        yield RunSummary(path, task, history, steps if isinstance(steps, int) else None, changed)


def can_generate(run: Path) -> bool:
    """Return whether a run's model generates text, by its record or its config."""
    try:
        if tables := RunDirectory(run).read_record():
            return find_record(tables.get("options", {})).pipeline == "text-generation"
        described = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
        return any("LMHead" in name for name in described["architectures"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, TiedGPTError):
        return False
