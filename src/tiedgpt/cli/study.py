"""`tiedgpt study tied-vs-untied [DATA ...]`: an experiment on a text, with its report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from tiedgpt.cli.console import fact, note, show_text, table
from tiedgpt.cli.options import Positional, parse

ABOUT = """Train a tied GPT, the same GPT untied, an untied one of the tied one's size and a tied
LSTM on the same batches, each once for every seed, and compare their losses, the norms of their
rows, the gradient of W and samples. On two cores that takes about ten minutes, and less with fewer
--steps. Into --out go report.html, which is one file, report.md with its figures, study.json with
all numbers, and the trained GPTs. The same command goes on where it was stopped: finished trainings
are kept, and the one that was cut begins anew, which costs a minute at most."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of `study`."""

    name: Positional[Literal["tied-vs-untied"]]
    """The experiment."""
    data: Positional[tuple[str, ...]] = ()
    """Text files, folders, globs, .jsonl, or - for standard input; none: Python's own docs."""
    steps: int = 600
    """Steps of each training."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of first weights and of the order of batches; two at least. default: 0 1 2."""
    out: str = "runs/tied-vs-untied"
    """The directory of the trainings and the report."""
    format: Literal["human", "json"] = "human"
    """json: one object with the numbers, on stdout."""


def run(arguments: list[str]) -> None:
    """Run a study."""
    given = parse(Arguments, "study", arguments, ABOUT)
    from tiedgpt.data import documents
    from tiedgpt.study import tied_vs_untied

    corpus = documents(given.data) if given.data else None
    study = tied_vs_untied(corpus, given.out, seeds=given.seeds, steps=given.steps, say=note)
    if given.format == "json":
        print(json.dumps(study.as_dict(), indent=1))
    else:
        (first, *others), rows = study.table()
        title = "mean +- half of the 95 % interval over the seeds"
        table([first, *(f">{name}" for name in others)], rows, title=title)
        show_text(f"\n{study.conclusion()}\n")
        fact("report", f"{given.out}/report.html and report.md")
