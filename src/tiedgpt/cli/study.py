"""`tiedgpt study tied-vs-untied [DATA ...]`: an experiment on a text, with its report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from tiedgpt.cli.console import fact, note, show_text, table
from tiedgpt.cli.options import Positional, parse

ABOUT = """Train four models on the same batches, once per seed: a tied GPT, the same GPT untied, an
untied GPT with as many parameters as the tied one, and a tied LSTM. Compare their losses, the norms
of W's rows, the gradients of W and samples. This takes about ten minutes on two cores, or less with
fewer --steps.

The directory --out gets report.html (one file), report.md with its figures, study.json with all
numbers, and the trained GPTs. The same command resumes: finished models are kept, and the
unfinished one begins again, which costs a minute at most."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of `study`."""

    name: Positional[Literal["tied-vs-untied"]]
    """The experiment."""
    data: Positional[tuple[str, ...]] = ()
    """Text files, folders, globs, .jsonl, or - for standard input; default: Python's own docs."""
    steps: int = 600
    """Training steps of each model."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial weights and the order of batches, at least two; default: 0 1 2."""
    out: str = "runs/tied-vs-untied"
    """The directory for the models and the report."""
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
