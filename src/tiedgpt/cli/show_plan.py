"""`--dry-run`: shows the plan, the memory and the time of a run that is not trained."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

from tiedgpt.cli.console import bar, console, fact, note, table
from tiedgpt.cli.run_arguments import RunArguments
from tiedgpt.files import format_bytes, format_count
from tiedgpt.runtime import find_device
from tiedgpt.train.dry_run import DryRun, dry_run
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.memory import estimate_memory, memory_limit


def show_plan(options: RunOptions, args: RunArguments) -> None:
    """Print the plan, the memory and the time; raise `NoRoomError` after it if it does not fit."""
    measures = options.chooses or find_device(options.device).type == "cuda"
    note("reading the text" + (" and measuring this machine" if measures else ""))
    first: DryRun | None = None
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bar("reading text"))
        for event in dry_run(options, threads=args.threads):
            if not isinstance(event, DryRun):
                progress(event.done, event.total)
                continue
            run = event
            if first is None:
                first = run
                stack.close()
                if args.format == "human":
                    _print_plan(first)
                if first.tokens_per_second is None and first.problem is None:
                    note("measuring the speed, which takes up to about 20 s")
    assert first is not None
    if args.format == "json":
        print(json.dumps(_list_facts(run)))
    else:
        _print_time(run, with_steps=run is not first and not first.has_steps)
    if run.problem is not None:
        raise run.problem


def _list_facts(run: DryRun) -> dict[str, Any]:
    """Return the numbers of a plan, as --format json prints them."""
    plan, data, config = run.plan, run.data, run.config
    memory = estimate_memory(config, plan, data, run.machine)
    limit = memory_limit(plan, run.machine)
    units, speed = plan.steps * plan.batch_size * data.row_units, run.tokens_per_second
    names = (
        "steps", "batch_size", "micro_batch", "optimizer", "lr", "dtype", "recompute", "compile",
        "threads",
    )  # fmt: skip
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


def _print_plan(run: DryRun) -> None:
    """Print the data, the model, the memory and, if it is known, the number of steps."""
    plan, data, facts = run.plan, run.data, _list_facts(run)
    trained = "" if data.n_trained is None else f"; {data.n_trained:,} are trained"
    note(*data.notes)
    for label, text in data.description.items():
        fact(label, text)
    about = run.publisher.describe()
    fact("model", f"{facts['parameters']:,} parameters; {about}{trained}")
    if run.has_steps:
        _print_steps(run, facts)
    mode = ", blocks recomputed in backward" if plan.recompute == "blocks" else ""
    mode += ", blocks compiled" if plan.compile == "on" else ""
    rows = f"{format_count(plan.micro_batch, 'sequence')} at a time{mode}"
    fact("computed", f"{plan.batch_size} x {data.row_units} {data.unit} in {plan.dtype}, {rows}")
    total = format_bytes(facts["memory_bytes"])
    parts = [(name, format_bytes(n_bytes)) for name, n_bytes in facts["memory"].items()]
    parts.append(("together", total))
    console().print()
    table(("memory", ">bytes"), parts, bold=[len(parts) - 1])
    console().print()
    fits = "fits in" if facts["fits"] else "does not fit in"
    limit = memory_limit(plan, run.machine)
    room = format_bytes(limit)
    if plan.memory is not None and limit < run.machine.free_bytes:
        room += f", which --memory {format_bytes(plan.memory)} leaves beside the program"
    fact("memory", f"{total} {fits} {room}")


def _print_steps(run: DryRun, facts: dict[str, Any]) -> None:
    """Print the reason for the plan and the number of steps."""
    plan, data = run.plan, run.data
    if plan.reason:
        fact("chosen", plan.reason)
    if facts["fits"]:
        fact(
            "training",
            f"{format_count(plan.steps, 'step')} of {plan.batch_size} x {data.row_units} "
            f"{data.unit}: {facts[data.unit]:,} {data.unit}, {facts['epochs']:,.2f} epochs",
        )


def _print_time(run: DryRun, *, with_steps: bool) -> None:
    """Print the time and the warnings and, unless they were known before, the steps."""
    facts = _list_facts(run)
    note(*run.warnings)
    if with_steps:
        _print_steps(run, facts)
    if facts["seconds"] is not None:
        here = "measured here"
        if run.measured:
            here = f"extrapolated from a part of a step, measured here ({run.measured})"
        fact(
            "time",
            f"{format_seconds(facts['seconds'])} at {run.tokens_per_second:,.0f} "
            f"{run.data.unit}/s, {here}; evaluations not counted",
        )


def format_seconds(seconds: float) -> str:
    """Return a duration in words: 0.02 s, 12 s, 3.5 minutes, 2.4 hours, 12 days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
