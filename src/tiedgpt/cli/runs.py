"""`tiedgpt runs [FOLDER]`: the runs so far, with their scores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from tiedgpt.cli.console import note, table
from tiedgpt.cli.options import parse
from tiedgpt.cli.plot import format_duration, format_validation
from tiedgpt.errors import UserError
from tiedgpt.options import argument, option
from tiedgpt.train.store.runs import RUNS, RunSummary, list_runs


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """List the runs, the newest last."""

    folder: str = argument("The folder of runs.", default=str(RUNS))
    format: Literal["human", "json"] = option("human", "json: a list of objects.", short="f")


def run(arguments: list[str]) -> None:
    """List the runs."""
    args = parse(Arguments, "runs", arguments, "List the runs, the newest last.")
    runs = list(list_runs(Path(args.folder), lambda error: note(f"skipped a run: {error}")))
    if args.format == "json":
        print(json.dumps([_to_dict(summary) for summary in runs], indent=1))
        return
    if not runs and (Path(args.folder) / "run.toml").exists():
        raise UserError(
            f"{args.folder} is a run, not a folder of runs",
            hint=f"use `tiedgpt plot {args.folder}` or `tiedgpt runs {Path(args.folder).parent}`",
        )
    if not runs:
        raise UserError(
            f"there is no run in {args.folder}", hint="train first, or give another folder"
        )
    rows = []
    for summary in runs:
        history = summary.history
        steps = f"{history.step:,}"
        if not history.finished and summary.steps is not None:
            steps += f" of {summary.steps:,}"
        when = datetime.fromtimestamp(summary.changed).strftime("%b %d %H:%M")
        score = format_validation(history)
        rows.append(
            (summary.path.name, summary.task, steps, format_duration(history.seconds), score, when)
        )
    table(["run", "task", ">steps", ">time", ">validation", ">changed"], rows)


def _to_dict(summary: RunSummary) -> dict[str, object]:
    history = summary.history
    scores = {k: history.last(k) for k in history.columns if k.startswith("val_")}
    return {
        "run": str(summary.path),
        "task": summary.task,
        "finished": history.finished,
        "steps": history.step,
        "planned": summary.steps,
        history.unit: history.units,
        "seconds": history.seconds,
        **scores,
        "changed": summary.changed,
    }
