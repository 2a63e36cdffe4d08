"""Compare LoRA with full fine-tuning: validation loss and number of trained parameters.

    python bench/lora.py [--size little] [--minutes 3] [--epochs 3] [--rank 4] [--seeds 0 1 2]
    python bench/lora.py --base MODEL

A model is trained on the language reference and the built-in modules of the documentation inside
this Python; or --base names one, for example that of `make demo`. It is then tuned to say what a
function of the standard library does: the prompt is the function's name and arguments, the
completion its docstring's first sentence. Both methods use the best of `RATES`, by the validation
loss of the first seed; a best rate at the edge is reported. Other settings are those of `tiedgpt
tune`. The script appends a JSON line to bench/results/lora-DATE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tiedgpt.cli.main import main as tiedgpt
from tiedgpt.data import python_documentation
from tiedgpt.train.dry_run import make_plan, prepare_fresh
from tiedgpt.train.events import Ended
from tiedgpt.train.loop import Trainer
from tiedgpt.train.plan.options import TuneOptions
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.task import open_task

FUNCTION = re.compile(r"^ *(\w+\(.*\))\n +([A-Z][^\n]{15,150}?\.)(?= |\n)", re.M)
LIBRARY = "python module "
"""Prefixes of the names of the documents that make up the task."""
RATES = {"full": [1e-3, 2e-3, 4e-3, 8e-3], "lora": [1e-2, 2e-2, 4e-2, 8e-2]}


def write_data(directory: Path) -> tuple[Path, Path]:
    """Write the text for the base, and the examples of the task; return their paths."""
    text, task = directory / "text", directory / "functions.jsonl"
    text.mkdir()
    found: dict[str, str] = {}
    for number, document in enumerate(python_documentation()):
        if document.name.startswith(LIBRARY):
            found |= FUNCTION.findall(document.text)
        else:
            (text / f"{number}.txt").write_text(document.text)
    lines = [
        {"prompt": f"Q: what does {function} do?\nA:", "completion": f" {sentence}"}
        for function, sentence in found.items()
    ]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return text, task


def tuned(path: Path, **options: Any) -> tuple[float, int, int]:
    """Tune; return the loss in nats on all held out, the parameters trained, and all of them."""
    asked = TuneOptions(**options)
    run = RunDirectory(path)
    prepared = prepare_fresh(open_task(asked), run)
    config, data = prepared.config, prepared.data(prepared.config)
    (*_, ended) = Trainer(prepared.task, data, Run(run, config, make_plan(prepared))).run()
    assert isinstance(ended, Ended)
    total = config.parameter_count()
    trained = data.n_trained or total
    nats = ended.score.nats
    say(f"{path.parent.name}, {path.name}: {nats:.4f} nats, {trained:,} of {total:,} trained")
    return nats, trained, total


def best(
    place: Path, rates: list[float], seeds: list[int], **options: Any
) -> tuple[float, list[tuple[float, int, int]]]:
    """Return the rate that is the best of the first seed, and its runs, one for each seed."""
    first, *others = seeds
    tried = {
        lr: tuned(place / f"rate {lr:g}", lr=lr, seed=first, **options) for lr in sorted(rates)
    }
    lr = min(tried, key=tried.__getitem__)
    if lr in (min(rates), max(rates)):
        say(f"the best rate {lr:g} is at the edge")
    more = [tuned(place / f"seed {seed}", lr=lr, seed=seed, **options) for seed in others]
    return lr, [tried[lr], *more]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="little")
    parser.add_argument("--minutes", type=float, default=3, help="of the base's training")
    parser.add_argument("--base", help="a model that is trained already")
    parser.add_argument("--epochs", type=float, default=3, help="of tuning")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        text, task = write_data(scratch)
        base = args.base or str(scratch / "base" / "model")
        if args.base is None:
            how = ["--size", args.size, "--minutes", str(args.minutes)]
            assert tiedgpt(["train", str(text), *how, "--out", str(scratch / "base")]) == 0
        found: dict[str, dict[str, Any]] = {}
        for name, rank in (("full", None), ("lora", args.rank)):
            lr, runs = best(
                scratch / name, RATES[name], args.seeds, lora=rank, data=(str(task),),
                start=base, epochs=args.epochs,
            )  # fmt: skip
            losses, (_, trained, total) = [run[0] for run in runs], runs[0]
            found[name] = {
                "rank": rank,
                "rate": lr,
                "trained": trained,
                "share": round(trained / total, 4),
                "nats": [round(loss, 4) for loss in losses],
                "median": round(statistics.median(losses), 4),
            }
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "model": args.base or f"{args.size}, trained for {args.minutes:g} minutes",
            "parameters": total,
            "examples": sum(1 for _ in task.open()),
            "epochs": args.epochs,
            **found,
            "lora / full": round(found["lora"]["median"] / found["full"]["median"], 4),
        }
    print(json.dumps(result, indent=2))
    args.results.mkdir(exist_ok=True)
    with (args.results / f"lora-{result['date']}.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
