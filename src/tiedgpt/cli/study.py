"""`tiedgpt study tied-vs-untied [DATA ...]`: an experiment on a text, with its report."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tiedgpt.cli.options import Positional, parse
from tiedgpt.errors import EXIT_OK

if TYPE_CHECKING:
    from tiedgpt.study import Study

ABOUT = """Train four models on the same batches, and measure what the tie does.

A tied GPT, the same GPT untied, an untied one of the tied one's size, and a tied LSTM, each once
for every seed. The report has validation losses with intervals, the loss by frequency of the token,
the norms of the rows on either side, the gradient of W from reading and predicting, and samples.

The same command again goes on where the last one stopped."""
GROUPS = {
    "budget": "minutes steps seeds",
    "output": "out format",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of `study`."""

    name: Positional[Literal["tied-vs-untied"]]
    """The experiment."""
    data: Positional[tuple[str, ...]] = ()
    """Text files, folders, globs, .jsonl, or - for standard input; none: Python's own docs."""
    minutes: float = 10.0
    """About how long all trainings take together."""
    steps: int | None = None
    """Steps of each training, in place of --minutes."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of first weights and of the order of batches; two at least. default: 0 1 2."""
    out: str = "runs/tied-vs-untied"
    """The directory of the trainings and the report."""
    format: Literal["human", "json"] = "human"
    """json: one object with the numbers, on stdout."""


def run(arguments: list[str]) -> int:
    """Run a study; return the exit code."""
    given = parse(Arguments, "study", arguments, ABOUT, groups=GROUPS)
    from tiedgpt.cli.console import note
    from tiedgpt.data import documents
    from tiedgpt.study import tied_vs_untied

    study = tied_vs_untied(
        documents(given.data) if given.data else None,
        given.out,
        seeds=given.seeds,
        minutes=given.minutes,
        steps=given.steps,
        say=note,
        progress=_progress,
    )
    if given.format == "json":
        print(json.dumps(study.as_dict(), indent=1))
    else:
        _show(study, given.out)
    return EXIT_OK


def _progress(label: str, step: int, steps: int) -> None:
    """Show on stderr how far a training is; a pipe gets its end alone."""
    if sys.stderr.isatty():
        print(f"\r{label:<22} step {step:,} of {steps:,}", end="", file=sys.stderr, flush=True)
    if step == steps:
        print("" if sys.stderr.isatty() else f"{label}: {steps:,} steps", file=sys.stderr)


def _show(study: Study, out: str) -> None:
    from tiedgpt.cli.console import fact, show_text, table
    from tiedgpt.study.models import NAMES

    rows = []
    for name, found in study.as_dict()["models"].items():
        (low, high), (least, most) = found["loss_interval"], found["difference_interval"]
        apart = f"{found['difference']:+.4f} ({least:+.4f} to {most:+.4f})"
        loss = f"{found['loss']:.4f} ({low:.4f} to {high:.4f})"
        rows.append(
            (NAMES[name], f"{found['parameters']:,}", loss, "" if name == "tied" else apart)
        )
    table(("model", ">parameters", ">loss, nats a token", ">less the tied GPT's"), rows)
    show_text(f"\n{study.conclusion()}\n")
    fact("report", f"{out}/report.html and report.md")
