"""`tiedgpt plot RUN...`: the curves of runs, here in the terminal or as a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from tiedgpt.cli.console import fact, note, table
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import newest_run
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.files import format_count
from tiedgpt.options import argument, option
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import smoothed
from tiedgpt.plots.terminal import print_panels
from tiedgpt.plots.training import Curve, Training, panels
from tiedgpt.train.store.metrics import Axis, History, read_history

ABOUT = """Plot loss, validation, learning rate and gradient norms of runs, also during training.

Without --out, the curves are drawn in the terminal."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw the curves of runs."""

    runs: tuple[str, ...] = argument(
        "Run directories, or folders of runs; default: the newest run.", default=(), metavar="RUN"
    )
    x: Axis = option(
        "tokens", "The x axis: tokens (or examples), steps, or seconds spent in steps."
    )
    out: Path | None = option(
        None,
        "Write a figure instead: FILE.png, .svg or .pdf (pip install 'tiedgpt[plot]').",
        short="o",
    )
    samples: bool = option(
        False, "Show the texts that the model generated during training instead."
    )
    format: Literal["human", "json"] = option("human", "json: the values of the curves.", short="f")


def run(arguments: list[str]) -> None:
    """Draw."""
    args = parse(Arguments, "plot", arguments, ABOUT)
    histories = open_histories(args.runs)
    if args.format == "json":
        print(json.dumps([_to_dict(history, args.x) for history in histories], indent=1))
        return
    if args.samples:
        show_samples(histories)
        return
    trainings = [Training(h.name, _curves(h, args.x)) for h in histories]
    curves = panels(trainings, label(histories, args.x))
    if args.out is None:
        show_summary(histories)
        print_panels(curves)
    else:
        save_figure(curves, args.out, ", ".join(history.name for history in histories))
        fact("written", str(args.out))


def open_histories(runs: Sequence[str]) -> list[History]:
    """Return the metrics of the named runs or the newest; `UserError` if all are empty.

    Of a folder, runs that cannot be read are skipped with a note.
    """
    paths = [path for name in runs for path in _runs_at(Path(name))]
    paths = paths or [newest_run("metrics.jsonl")]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    histories = []
    for path, name in zip(paths, names, strict=True):
        try:
            histories.append(read_history(path, name))
        except TiedGPTError as error:
            if len(paths) == 1 or path in map(Path, runs):
                raise
            note(f"skipped a run: {error}")
    for history in histories:
        if not history.step:
            note(f"{history.name} has no steps yet")
    histories = [history for history in histories if history.step]
    if not histories:
        raise UserError("there is nothing to plot yet", hint="wait for the first step")
    return histories


def _runs_at(path: Path) -> list[Path]:
    """Return the run at a path, or those in it."""
    inside = sorted(file.parent for file in path.glob("*/metrics.jsonl") if file.exists())
    return [path] if (path / "metrics.jsonl").exists() else inside or [path]


def _curves(history: History, axis: Axis) -> dict[str, Curve]:
    """Return a run's curves over the axis, by the keys of its metrics."""
    return {key: history.series(key, axis) for key in history.columns}


def label(histories: Sequence[History], axis: Axis) -> str:
    """Return the label of the axis."""
    return axis if axis != "tokens" else "/".join(sorted({history.unit for history in histories}))


def show_summary(histories: Sequence[History]) -> None:
    """Show the state of each run, one line each."""
    rows = []
    for history in histories:
        _, losses = history.series("loss", "steps")
        state = ["" if history.finished else "unfinished"]
        state += [f"{history.skipped:,} skipped"] if history.skipped else []
        rows.append(
            (
                history.name,
                f"{history.step:,}",
                f"{history.units:,}",
                format_duration(history.seconds),
                f"{smoothed(losses)[-1]:.3f}" if losses else "",
                format_validation(history),
                ", ".join(filter(None, state)),
            )
        )
    columns = "steps", histories[0].unit, "time", "loss, nats", "validation"
    table(["run", *(f">{name}" for name in columns), ""], rows)


def format_validation(history: History) -> str:
    """Return the newest validation in a few words."""
    if (bits := history.last("val_bits_per_byte")) is not None:
        return f"{bits:.3f} bits/byte"
    keys = [key for key in history.columns if key.startswith("val_")]
    key = max(keys, key=lambda key: key != "val_loss", default="val_loss")
    value = history.last(key)
    return "" if value is None else f"{key.removeprefix('val_').replace('_', ' ')} {value:.3f}"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds: 0:03:07."""
    return str(timedelta(seconds=round(seconds)))


def show_samples(histories: Sequence[History]) -> None:
    """Show the samples of each evaluation."""
    for history in histories:
        fact(history.name, format_count(len(history.samples), "sample"))
        for step, sample in sorted(history.samples.items()):
            loss = history.columns.get("val_loss", {}).get(step)
            score = "" if loss is None else f"  validation loss {loss:.3f}"
            print(f"\n--- step {step:,}{score}\n{sample.rstrip()}")


def _to_dict(history: History, axis: Axis) -> dict[str, object]:
    return {
        "run": history.name,
        "x": label([history], axis),
        "finished": history.finished,
        "curves": {key: {"x": xs, "y": ys} for key, (xs, ys) in _curves(history, axis).items()},
        "samples": history.samples,
    }
