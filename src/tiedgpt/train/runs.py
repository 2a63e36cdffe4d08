"""The runs in a folder: which one a command means, whether it goes on, and how they stand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError
from tiedgpt.train.history import History, read_history
from tiedgpt.train.options import AUTO, DURATIONS, TrainOptions
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.tune_options import TuneOptions

RUNS = Path("runs")


def run_name(options: TrainOptions) -> str:
    """Return NAME of the data, with -SIZE, -TASK, -fork or -tuned where one of them was given."""
    first = options.data[0] if options.data else "python-docs"
    stem = "stdin" if first == "-" else Path(os.path.abspath(first)).stem
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).strip("-.") or "data"
    kind = options.size if options.task == "lm" and options.start is None else options.task
    kind = kind if options.fork is None else "fork"
    kind = "tuned" if isinstance(options, TuneOptions) else kind
    return name if kind == AUTO else f"{name}-{kind}"


def run_for(options: TrainOptions, digest: str | None, folder: Path = RUNS) -> Path:
    """Return the run under `folder` that these options on this data mean: NAME-1, NAME-2, ...

    It is the newest that has the same options, or has ended and is asked to go on longer. Else it
    is a new one. `digest` is that of the data.
    """
    name = run_name(options)
    numbered = {n: path for path in folder.glob(f"{name}-*") if (n := _number(path, name))}
    longer = None
    for _, path in sorted(numbered.items(), reverse=True):
        run = RunDirectory(path)
        tables = _tables(run)
        if not run.record.exists() and not run.in_use():
            return path  # what an attempt left that never came to its first step
        if not tables or tables.get("text", {}).get("sha256") != digest:
            continue
        if not options.differences(tables.get("options", {})):
            return path
        if longer is None and times_longer(options, tables) and run.finished():
            longer = path
    return longer or folder / f"{name}-{max(numbered, default=0) + 1}"


def tuned_from(options: TuneOptions, runs: Iterable[Path]) -> str | None:
    """Return what the newest run of these options was tuned from, whichever `start` they name."""
    records = [run / "run.toml" for run in runs if (run / "run.toml").exists()]
    for record in sorted(records, key=os.path.getmtime, reverse=True):
        tables = _tables(RunDirectory(record.parent))
        then = tables.get("options", {})
        if "too_long" in then:
            same = replace(options, start=then["start"])
            if not same.differences(then) or times_longer(same, tables):
                return str(then["start"])
    return None


def _tables(run: RunDirectory) -> dict[str, Any]:
    """Return what run.toml says; {} where there is none, or it is damaged."""
    try:
        return run.read_record()
    except CorruptInputError:
        return {}


def _number(path: Path, name: str) -> int:
    ending = path.name.removeprefix(f"{name}-")
    return int(ending) if re.fullmatch(r"[1-9]\d{0,8}", ending) else 0


def times_longer(options: TrainOptions, tables: dict[str, Any]) -> float | None:
    """Return how many times as long options ask for as a recorded run; None where more differs."""
    then = tables.get("options", {})
    as_then = replace(options, **{name: then.get(name) for name in DURATIONS})
    if as_then.differences(then):
        return None
    (unit, before), (now_unit, now) = as_then.duration, options.duration
    return now / before if unit == now_unit and now > before else None


def make_longer(run: RunDirectory, options: TrainOptions, times: float) -> dict[str, Any]:
    """Let a run that has ended go on by a plan of more steps; return its new record.

    The rate goes on where the longer plan has it. Raises `CorruptInputError` for a damaged record.
    """
    from tiedgpt.train.plan import longer_plan, plan_tables, recorded

    tables = run.read_record()
    step = run.reopen()
    plan = longer_plan(recorded(tables)[1], options, step, times)
    given = {name: getattr(options, name) for name in DURATIONS}
    options_now = {"options": tables["options"] | given}
    run.write_record({**tables, **options_now, **plan_tables(plan)})
    return run.read_record()


@dataclass(frozen=True)
class Standing:
    """How a run stands."""

    path: Path
    task: str
    history: History
    steps: int | None
    """Planned; None where no record says so."""
    changed: float
    """When, in seconds since 1970."""


def runs_in(folder: Path = RUNS) -> Iterator[Standing]:
    """Yield the runs in a folder that have a metrics.jsonl, the newest last."""
    metrics = [(path.stat().st_mtime, path.parent) for path in folder.glob("*/metrics.jsonl")]
    for changed, path in sorted(metrics):
        tables = _tables(RunDirectory(path))
        steps = tables.get("training", {}).get("steps")
        task = str(tables.get("options", {}).get("task", "lm"))
        yield Standing(path, task, read_history(path), steps, changed)


def can_generate(run: Path) -> bool:
    """Whether a run's model writes texts: by its record, or of one without it by its config."""
    try:
        if tables := RunDirectory(run).read_record():
            return bool(tables.get("options", {}).get("task", "lm") == "lm")
        described = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
        return any("LMHead" in name for name in described["architectures"])
    except (OSError, ValueError, TypeError, KeyError, CorruptInputError):
        return False
