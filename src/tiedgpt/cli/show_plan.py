"""`--dry-run`: shows the plan, the memory and the time of a run that is not trained."""

from __future__ import annotations

import json
import math
from typing import Any

from tiedgpt.cli.console import bar, console, fact, note, table
from tiedgpt.cli.train import RunArguments
from tiedgpt.files import format_bytes
from tiedgpt.train.options import TrainOptions, format_count
from tiedgpt.train.run import DryRun, dry_run


def show_plan(options: TrainOptions, args: RunArguments) -> None:
    """Print the plan, the memory and the time; raise `NoRoomError` after it if it does not fit."""
    note("reading the text and measuring this machine")
    with bar("reading text") as progress:
        run = dry_run(options, threads=args.threads, progress=progress)
    if args.format == "json":
        print(json.dumps(to_data(run)))
    else:
        _print_plan(run)
    if run.problem is not None:
        raise run.problem


def to_data(run: DryRun) -> dict[str, Any]:
    """Return the plan as plain data."""
    config, plan = run.objective.config, run.plan
    names = ("steps", "batch_size", "micro_batch", "optimizer", "dtype", "recompute", "threads")
    has_limit = math.isfinite(run.memory_limit)
    return {
        "parameters": config.parameter_count(),
        "trained": run.objective.n_trained or config.parameter_count(),
        run.data.unit: run.units,
        "epochs": run.epochs,
        "plan": {name: getattr(plan, name) for name in names},
        "memory": run.memory,
        "memory_bytes": sum(run.memory.values()),
        "memory_limit_bytes": int(run.memory_limit) if has_limit else None,
        "fits": run.problem is None,
        f"{run.data.unit}_per_second": run.tokens_per_second,
        "seconds": run.seconds,
        "warnings": run.warnings,
    }


def _print_plan(run: DryRun) -> None:
    plan, data, objective = run.plan, run.data, run.objective
    config = objective.config
    trained = "" if objective.n_trained is None else f"; {objective.n_trained:,} are trained"
    note(*data.notes, *run.warnings)
    fact(*next(iter(data.description.items())))
    fact("tokens", data.description["tokens"])
    fact("model", f"{config.parameter_count():,} parameters; {objective.describe(config)}{trained}")
    if plan.reason:
        fact("chosen", plan.reason)
    if run.problem is None:
        fact(
            "training",
            f"{format_count(plan.steps, 'step')} of {plan.batch_size} x {data.row_units} "
            f"{data.unit}: {run.units:,} {data.unit}, {run.epochs:,.2f} epochs",
        )
    mode = ", blocks recomputed in backward" if plan.recompute == "blocks" else ""
    at_a_time = format_count(plan.micro_batch, "sequence")
    fact("computed", f"in {plan.dtype}, {at_a_time} at a time{mode}")
    total = format_bytes(sum(run.memory.values()))
    rows = [(name, format_bytes(n_bytes)) for name, n_bytes in run.memory.items()]
    rows.append(("together", total))
    console().print()
    table(("memory", ">bytes"), rows, bold=[len(rows) - 1])
    console().print()
    fits = "fits in" if run.problem is None else "does not fit in"
    fact("memory", f"{total} {fits} {format_bytes(run.memory_limit)}")
    if run.seconds is not None:
        fact(
            "time",
            f"{format_seconds(run.seconds)} at {run.tokens_per_second:,.0f} {data.unit}/s, "
            "measured here; evaluations not counted",
        )


def format_seconds(seconds: float) -> str:
    """Return a duration in words: 0.02 s, 12 s, 3.5 minutes, 2.4 hours, 12 days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
