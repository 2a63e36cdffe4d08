"""`--dry-run`: shows the plan, the memory and the time of a run that is not trained."""

from __future__ import annotations

import json
import math

from tiedgpt.cli.console import bar, console, fact, note, table
from tiedgpt.cli.train import RunArguments
from tiedgpt.files import format_bytes
from tiedgpt.train.options import TrainOptions, format_count
from tiedgpt.train.planning import estimate_memory, memory_limit
from tiedgpt.train.run import DryRun, dry_run


def show_plan(options: TrainOptions, args: RunArguments) -> None:
    """Print the plan, the memory and the time; raise `NoRoomError` after it if it does not fit."""
    note("reading the text and measuring this machine")
    with bar("reading text") as progress:
        run = dry_run(options, threads=args.threads, progress=progress)
    memory = estimate_memory(run.objective.config, run.plan, run.data, run.machine)
    limit = memory_limit(run.plan, run.machine)
    units = run.plan.steps * run.plan.batch_size * run.data.row_units
    seconds = None if run.tokens_per_second is None else units / run.tokens_per_second
    if args.format == "json":
        _print_json(run, memory, limit, units, seconds)
    else:
        _print_plan(run, memory, limit, units, seconds)
    if run.problem is not None:
        raise run.problem


def _print_json(
    run: DryRun, memory: dict[str, int], limit: float, units: int, seconds: float | None
) -> None:
    plan, data, count = run.plan, run.data, run.objective.config.parameter_count()
    names = ("steps", "batch_size", "micro_batch", "optimizer", "dtype", "recompute", "threads")
    values = {
        "parameters": count,
        "trained": data.n_trained or count,
        data.unit: units,
        "epochs": plan.steps * plan.batch_size / data.epoch_rows,
        "plan": {name: getattr(plan, name) for name in names},
        "memory": memory,
        "memory_bytes": sum(memory.values()),
        "memory_limit_bytes": int(limit) if math.isfinite(limit) else None,
        "fits": run.problem is None,
        f"{data.unit}_per_second": run.tokens_per_second,
        "seconds": seconds,
        "warnings": run.warnings,
    }
    print(json.dumps(values))


def _print_plan(
    run: DryRun, memory: dict[str, int], limit: float, units: int, seconds: float | None
) -> None:
    plan, data, objective = run.plan, run.data, run.objective
    config = objective.config
    trained = "" if data.n_trained is None else f"; {data.n_trained:,} are trained"
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
            f"{data.unit}: {units:,} {data.unit}, "
            f"{plan.steps * plan.batch_size / data.epoch_rows:,.2f} epochs",
        )
    mode = ", blocks recomputed in backward" if plan.recompute == "blocks" else ""
    fact(
        "computed", f"in {plan.dtype}, {format_count(plan.micro_batch, 'sequence')} at a time{mode}"
    )
    total = format_bytes(sum(memory.values()))
    rows = [(name, format_bytes(n_bytes)) for name, n_bytes in memory.items()]
    rows.append(("together", total))
    console().print()
    table(("memory", ">bytes"), rows, bold=[len(rows) - 1])
    console().print()
    fits = "fits in" if run.problem is None else "does not fit in"
    fact("memory", f"{total} {fits} {format_bytes(limit)}")
    if seconds is not None:
        fact(
            "time",
            f"{format_seconds(seconds)} at {run.tokens_per_second:,.0f} {data.unit}/s, "
            "measured here; evaluations not counted",
        )


def format_seconds(seconds: float) -> str:
    """Return a duration in words: 0.02 s, 12 s, 3.5 minutes, 2.4 hours, 12 days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
