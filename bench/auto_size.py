"""Compare the choice of `--size auto` with the neighbouring sizes, trained for the same time.

    python bench/auto_size.py [--texts docs licences] [--minutes 1 3] [--speeds tiny=25000 ...]

Two texts of different kinds, whose length depends on the Python and the packages installed: the
documentation inside this Python, and the licences of its packages, each paragraph once. For each
text and budget the rule chooses a size by the speeds measured here, or by `--speeds` (tokens a
second), so that sizes can be compared on a busy machine. The chosen size and its neighbours are
trained by the loop of `tiedgpt train`, with the rule's settings, for the number of steps that fit
in the minutes at these speeds. The score is bits per byte on all held-out text. The script appends
a JSON line for each choice to bench/results/auto_size-DATE.jsonl, with the predicted scores.

The constants of the law in `train/plan/size.py` were fitted to final scores of such runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tiedgpt.runtime import find_device
from tiedgpt.train.distributed import Processes
from tiedgpt.train.dry_run import prepare_fresh
from tiedgpt.train.events import Ended
from tiedgpt.train.loop import Trainer
from tiedgpt.train.plan.draft import draft_plan
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.plan.plan import plan_run
from tiedgpt.train.plan.size import (
    MAX_AUTO_EPOCHS,
    apply_size,
    candidate_sizes,
    expected_loss,
    with_choices,
)
from tiedgpt.train.speed import measure_machine, measure_speed
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.language import LanguageModelling

MEASURED_SECONDS = 2.0


def licences() -> str:
    """Return the licences of the packages of this Python, each paragraph once."""
    seen: set[str] = set()
    kept = []
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*")):
        if path.is_file() and re.match("LICEN|COPYING|NOTICE|ThirdParty", path.name, re.I):
            for paragraph in re.split(r"\n\s*\n", path.read_text(errors="ignore")):
                key = " ".join(paragraph.split())
                if key and key not in seen:
                    seen.add(key)
                    kept.append(paragraph)
    return "\n\n".join(kept)


def data(name: str, scratch: Path) -> tuple[str, ...]:
    """Return the data of a text as `tiedgpt train` takes them."""
    if name == "docs":
        return ()
    path = scratch / "licences.txt"
    path.write_text(licences(), encoding="utf-8")
    return (str(path),)


def trained(options: TrainOptions, run: RunDirectory, scratch: Path) -> float:
    """Return the bits per byte that training by these options ends with; the data are there."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        fresh = RunDirectory(Path(place))
        for name in ("data", "tokenizer"):
            os.symlink(run.path / name, fresh.path / name)
        task = LanguageModelling(options)
        prepared = prepare_fresh(task, fresh)
        machine, _ = measure_machine(prepared, Processes(find_device()))
        config, plan = plan_run(options, prepared.config, prepared.facts, machine)
        *_, ended = Trainer(task, prepared.data(config), Run(fresh, config, plan)).run()
    assert isinstance(ended, Ended)
    return ended.metrics["val_bits_per_byte"]


def choice(name: str, minutes: float, speeds: dict[str, float], scratch: Path) -> dict[str, Any]:
    """Return the chosen size, and the final scores of it and its neighbours."""
    options = TrainOptions(data=data(name, scratch), minutes=minutes)
    run = RunDirectory(scratch / name)
    prepared = prepare_fresh(LanguageModelling(options), run)
    text = prepared.facts
    text_tokens = text.text_tokens
    assert text_tokens is not None
    processes = Processes(find_device())
    machine, _ = measure_machine(prepared, processes)
    expected, asked = {}, {}
    for size in candidate_sizes(text_tokens):
        whole = with_choices(
            replace(options, dropout=0.0), size, float("inf"), text_tokens, machine
        )
        if size not in speeds:
            config, sized_facts = apply_size(whole, prepared.config, text)
            plan = draft_plan(whole, config, sized_facts, machine)
            measured = measure_speed(
                prepared.task, config, prepared.data(config), plan, processes, MEASURED_SECONDS
            )
            speeds[size] = measured.tokens_per_second
        tokens = min(60 * minutes * speeds[size], MAX_AUTO_EPOCHS * text_tokens)
        expected[size] = expected_loss(size, tokens, text_tokens)
        sized = with_choices(options, size, tokens, text_tokens, machine)
        steps = max(1, round(tokens / (sized.batch_size * sized.context)))
        asked[size] = replace(sized, steps=steps, minutes=None)
        if expected[size] > 1.5 * min(expected.values()):
            break  # larger ones take long to measure
    sizes = list(expected)
    chosen = min(sizes, key=expected.__getitem__)
    place = sizes.index(chosen)
    scores = {}
    for size in sizes[max(0, place - 1) : place + 2]:
        scores[size] = round(trained(asked[size], run, scratch), 4)
        print(f"{name} {minutes:g} min {size}: {scores[size]} bits per byte", flush=True)
    best = min(scores.values())
    return {
        "text": name,
        "minutes": minutes,
        "text tokens": text_tokens,
        "chosen": chosen,
        "over the best": f"{100 * (scores[chosen] / best - 1):.1f} %",
        "bits per byte": scores,
        "steps": {size: asked[size].steps for size in scores},
        "dropout": {size: asked[size].dropout for size in scores},
        "expected": {size: round(value, 3) for size, value in expected.items()},
        "tokens a second": {size: round(speeds[size]) for size in expected},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", nargs="+", default=["docs", "licences"])
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--speeds", nargs="*", default=[], help="SIZE=TOKENS_PER_SECOND ...")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.results.mkdir(exist_ok=True)
    path = args.results / f"auto_size-{time.strftime('%Y-%m-%d')}.jsonl"
    pairs = (text.partition("=") for text in args.speeds)
    known = {size: float(number) for size, _, number in pairs}
    for name in args.texts:
        speeds = dict(known)
        for minutes in args.minutes:
            with tempfile.TemporaryDirectory() as scratch:
                found = choice(name, minutes, speeds, Path(scratch))
            machine = f"{os.cpu_count()} cores, {find_device()}, torch {torch.__version__}"
            line = {"date": time.strftime("%Y-%m-%d"), "machine": machine, **found}
            print(json.dumps(line, indent=2))
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
