"""`--dry-run`: shows the plan, the memory and the time of a run that is not trained."""

from __future__ import annotations

import json
import math
from typing import Any

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
    facts = _list_facts(run)
    if args.format == "json":
        print(json.dumps(facts))
    else:
        _print_plan(run, facts)
    if run.problem is not None:
        raise run.problem


def _list_facts(run: DryRun) -> dict[str, Any]:
    """Return the numbers of a plan, as --format json prints them."""
    plan, data, config = run.plan, run.data, run.objective.config
    memory = estimate_memory(config, plan, data, run.machine)
    limit = memory_limit(plan, run.machine)
    units, speed = plan.steps * plan.batch_size * data.row_units, run.tokens_per_second
    names = ("steps", "batch_size", "micro_batch", "optimizer", "dtype", "recompute", "threads")
    return {
        "parameters": config.parameter_count(),
        "trained": data.n_trained or config.parameter_count(),
        data.unit: units,
        "epochs": plan.steps * plan.batch_size / data.epoch_rows,
        "plan": {name: getattr(plan, name) for name in names},
        "memory": memory,
        "memory_bytes": sum(memory.values()),
        "memory_limit_bytes": int(limit) if math.isfinite(limit) else None,
        "fits": run.problem is None,
        f"{data.unit}_per_second": speed,
        "seconds": None if speed is None else units / speed,
        "warnings": run.warnings,
    }


def _print_plan(run: DryRun, facts: dict[str, Any]) -> None:
    plan, data, objective = run.plan, run.data, run.objective
    trained = "" if data.n_trained is None else f"; {data.n_trained:,} are trained"
    note(*data.notes, *run.warnings)
    for label, text in data.description.items():
        fact(label, text)
    about = objective.describe(objective.config)
    fact("model", f"{facts['parameters']:,} parameters; {about}{trained}")
    if plan.reason:
        fact("chosen", plan.reason)
    if facts["fits"]:
        fact(
            "training",
            f"{format_count(plan.steps, 'step')} of {plan.batch_size} x {data.row_units} "
            f"{data.unit}: {facts[data.unit]:,} {data.unit}, {facts['epochs']:,.2f} epochs",
        )
    mode = ", blocks recomputed in backward" if plan.recompute == "blocks" else ""
    fact(
        "computed", f"in {plan.dtype}, {format_count(plan.micro_batch, 'sequence')} at a time{mode}"
    )
    total = format_bytes(facts["memory_bytes"])
    rows = [(name, format_bytes(n_bytes)) for name, n_bytes in facts["memory"].items()]
    rows.append(("together", total))
    console().print()
    table(("memory", ">bytes"), rows, bold=[len(rows) - 1])
    console().print()
    fits = "fits in" if facts["fits"] else "does not fit in"
    fact("memory", f"{total} {fits} {format_bytes(memory_limit(plan, run.machine))}")
    if facts["seconds"] is not None:
        fact(
            "time",
            f"{format_seconds(facts['seconds'])} at {run.tokens_per_second:,.0f} {data.unit}/s, "
            "measured here; evaluations not counted",
        )


def format_seconds(seconds: float) -> str:
    """Return a duration in words: 0.02 s, 12 s, 3.5 minutes, 2.4 hours, 12 days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
