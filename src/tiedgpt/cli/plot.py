"""`tiedgpt plot RUN...`: the curves of runs, here in the terminal or as a figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.source import RUNS
from tiedgpt.errors import EXIT_OK, UserError
from tiedgpt.train.history import Axis, History, read_history

if TYPE_CHECKING:
    from rich.console import Console

    from tiedgpt.plots.training import Training

ABOUT = """Draw loss, validation, rate and gradients of one or several runs, also while they run.

Without --out the curves are drawn in the terminal."""
HEIGHTS = (14, 12, 7)
"""Rows of the first panel, of the second, and of the others."""
SAMPLES_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw the curves of runs."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Run directories; a directory of several runs stands for them all. None: the newest run."""
    x: Axis = "tokens"
    """The axis: tokens (or examples), steps, or seconds spent in steps."""
    out: str | None = None
    """Write a figure instead: .png, .svg or .pdf (pip install tiedgpt[plot])."""
    samples: bool = False
    """Show instead what the model wrote as it was trained."""
    format: Literal["human", "json"] = "human"
    """json: the curves' numbers."""


def run(arguments: list[str]) -> int:
    """Draw; return the exit code."""
    given = parse(Arguments, "plot", arguments, ABOUT)
    if given.out is not None:
        from tiedgpt.plots.figure import require_figures

        require_figures(Path(given.out))
    histories = open_histories(given.runs)

    if given.format == "json":
        print(json.dumps([_plain(history, given.x) for history in histories], indent=1))
        return EXIT_OK
    from rich.console import Console

    console = Console(highlight=False)
    if given.samples:
        for history in histories:
            show_samples(console, history)
        return EXIT_OK
    from tiedgpt.plots.training import panels

    drawn = panels(
        [as_training(history, given.x) for history in histories], label(histories, given.x)
    )
    show_summary(console, histories)
    if given.out is None:
        draw_panels(console, drawn)
        return EXIT_OK
    from tiedgpt.plots.figure import save_figure

    save_figure(drawn, Path(given.out), ", ".join(history.name for history in histories))
    console.print(f"written to {given.out}", soft_wrap=True, markup=False)
    return EXIT_OK


def open_histories(runs: Sequence[str]) -> list[History]:
    """Return the metrics of the runs named, or of the newest; `UserError` where none has any."""
    paths = [path for name in runs for path in _runs_at(Path(name))] or [_newest()]
    shown = _names(paths)
    histories = []
    for path, name in zip(paths, shown, strict=True):
        history = read_history(path, name)
        if history.step:
            histories.append(history)
        else:
            print(f"{path} has no steps yet", file=sys.stderr)
    if not histories:
        raise UserError("there is nothing to draw yet: wait for the first step")
    return histories


def _runs_at(path: Path) -> list[Path]:
    """Return the run at a path, or those in it."""
    inside = sorted(path.glob("*/metrics.jsonl"), key=lambda file: (len(file.parts), file))
    if (path / "metrics.jsonl").exists() or not inside:
        return [path]
    return [file.parent for file in inside]


def _newest() -> Path:
    found = sorted(RUNS.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError("no run is named and there is none in runs/: name one, or train first")
    print(f"(the newest run: {found[-1].parent})", file=sys.stderr)
    return found[-1].parent


def _names(paths: Sequence[Path]) -> list[str]:
    """Return short names that tell the runs apart."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def as_training(history: History, axis: Axis) -> Training:
    """Return a run's curves over the axis."""
    from tiedgpt.plots.training import Training

    return Training(history.name, {key: history.series(key, axis) for key in history.columns})


def label(histories: Sequence[History], axis: Axis) -> str:
    """Return what the axis counts."""
    return axis if axis != "tokens" else "/".join(sorted({history.unit for history in histories}))


def draw_panels(console: Console, drawn: Sequence[object]) -> None:
    """Draw panels below one another, as wide as the terminal and at most 120 columns."""
    from tiedgpt.plots.panel import Panel
    from tiedgpt.plots.terminal import draw

    width = min(console.width, 120)
    for number, panel in enumerate(drawn):
        assert isinstance(panel, Panel)
        height = HEIGHTS[min(number, len(HEIGHTS) - 1)]
        console.print(draw(panel, width=width, height=height), soft_wrap=True)


def show_summary(console: Console, histories: Sequence[History]) -> None:
    """Show where each run stands, a line each."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for name in ("steps", histories[0].unit, "time", "loss", "validation", "speed", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for history in histories:
        table.add_row(history.name, *_standing(history))
    console.print(table)


def _standing(history: History) -> list[str]:
    from tiedgpt.plots.panel import smoothed

    _, losses = history.series("loss", "steps")
    speed = history.last(f"{history.unit}_per_second")
    return [
        f"{history.step:,}",
        f"{history.units:,}",
        duration(history.seconds),
        f"{smoothed(losses)[-1]:.3f}" if losses else "",
        validated(history),
        f"{speed:,.0f}/s" if speed else "",
        ", ".join(
            f"{history.skipped:,} skipped" if said == "skipped" else said
            for said, so in (("skipped", history.skipped), ("unfinished", not history.finished))
            if so
        ),
    ]


def validated(history: History) -> str:
    """Return the newest validation in a few words."""
    if (bits := history.last("val_bits_per_byte")) is not None:
        return f"{bits:.3f} bits/byte"
    shares = [key for key in history.columns if key.startswith("val_") and key != "val_loss"]
    if shares:
        share = history.last(shares[0]) or 0.0
        return f"{shares[0].removeprefix('val_').replace('_', ' ')} {100 * share:.1f} %"
    loss = history.last("val_loss")
    return "" if loss is None else f"{loss:.3f} nats"


def duration(seconds: float) -> str:
    """Return seconds as people say them: 41 s, 3:07, 2:05:00."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_samples(console: Console, history: History) -> None:
    """Show what the model wrote at some of its evaluations, the last among them."""
    from rich.markup import escape

    steps = sorted(history.samples)
    console.print(escape(f"{history.name}: {len(steps)} samples"), style="bold")
    wanted = max(1, -(-len(steps) // SAMPLES_SHOWN))
    for step in steps[::-1][::wanted][::-1]:
        loss = history.columns.get("val_loss", {}).get(step)
        said = "" if loss is None else f"  validation loss {loss:.3f}"
        console.rule(f"step {step:,}{said}", align="left", characters="─")
        console.print(escape(history.samples[step].rstrip()), soft_wrap=False)


def _plain(history: History, axis: Axis) -> dict[str, object]:
    curves = {}
    for key in history.columns:
        xs, ys = history.series(key, axis)
        curves[key] = {"x": xs, "y": ys}
    return {
        "run": history.name,
        "x": label([history], axis),
        "finished": history.finished,
        "curves": curves,
        "samples": history.samples,
    }
