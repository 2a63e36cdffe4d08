"""What `--dry-run` shows of a run that is only planned."""

from __future__ import annotations

import json

from tiedgpt.cli.console import bar, console, fact, note, table
from tiedgpt.cli.train import RunArguments
from tiedgpt.files import format_bytes
from tiedgpt.train.forecast import Forecast, forecast
from tiedgpt.train.options import format_count
from tiedgpt.train.tune_options import AnyOptions


def show_forecast(options: AnyOptions, args: RunArguments) -> None:
    """Print the plan, the memory and the time; `NoRoomError` after it where it does not fit."""
    with bar("reading text") as progress:
        planned = forecast(options, args.devices, args.parallel, progress)
    if args.format == "json":
        print(json.dumps(planned.tables()))
    else:
        _print_forecast(planned)
    if not planned.fits:
        raise planned.problem


def _print_forecast(planned: Forecast) -> None:
    """Print what is trained, a table of memory, and how the time was reckoned."""
    plan, data, fleet = planned.plan, planned.data, planned.fleet
    config, objective = planned.objective.config, planned.objective
    trained = "" if objective.n_trained is None else f"; {objective.n_trained:,} are trained"
    counted = planned.tables()
    note(*data.notes)
    fact(*next(iter(data.description.items())))
    fact("tokens", data.description["tokens"])
    fact("model", f"{config.parameter_count():,} parameters; {objective.describe(config)}{trained}")
    if plan.reason:
        fact("chosen", plan.reason)
    fact(
        "training",
        f"{format_count(plan.steps, 'step')} of {plan.batch_size} x {data.row_units} {data.unit}: "
        f"{counted[data.unit]:,} {data.unit}, {counted['epochs']:,.2f} epochs",
    )
    how = ", blocks computed again in backward" if plan.recompute == "blocks" else ""
    mode = f" with {fleet.parallel}" if fleet.count > 1 else ""
    at_a_time = format_count(plan.micro_batch, "sequence")
    fact("devices", f"{fleet.name}{mode}; in {plan.dtype}, {at_a_time} at a time{how}")
    rows = [(part, format_bytes(n), how) for part, (n, how) in planned.memory.items()]
    verdict = "fits in" if planned.fits else "does not fit in"
    rows.append(
        ("together", format_bytes(planned.n_bytes), f"{verdict} {format_bytes(fleet.memory)}")
    )
    console().print()
    table(("memory of a device", ">bytes", "by"), rows, bold=[len(rows) - 1])
    console().print()
    symbols = {
        "N": config.parameter_count(), "N'": counted["trained"], "V": config.vocab_size,
        "T": data.row_tokens, "D": config.n_embd, "L": config.n_layer, "I": config.inner_dim,
        "H": config.n_head, "b": plan.micro_batch, "w": fleet.count,
    }  # fmt: skip
    fact("where", ", ".join(f"{name} = {value:,}" for name, value in symbols.items()))
    for name, (seconds, by) in planned.times.items():
        fact(name, f"{format_seconds(seconds)} a step: {by}")
    fact("time", f"{format_seconds(planned.step_seconds * plan.steps)}, evaluations not counted")


def format_seconds(seconds: float) -> str:
    """Return a time as people write it: 0.02 s, 12 s, 3.5 minutes, 2.4 hours, 12 days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
