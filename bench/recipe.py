"""Compare tokens and time to a loss: the default recipe against tuned AdamW with cosine decay.

    python bench/recipe.py [--size tiny] [--epochs 4] [--seeds 0 1 2] [--rates 1e-3 2e-3 4e-3 8e-3]

Both train the same model by the same loop, on the documentation inside this Python, with the same
batches and warm-up. The peer is AdamW (betas 0.9 and 0.95, decay 0.1) whose learning rate falls
along a cosine to a tenth. The rate is the best of `--rates` by the final validation loss of the
first seed; if the best is the lowest or the highest rate, the search continues beyond it. Ours is
`tiedgpt train` with default options. Its learning rate falls to 0, so it is trained anew for each
of `--shares` of the peer's steps; the result is the smallest share whose final loss is at most the
peer's.

Final losses are on all validation text; curves on a fixed part of it. Seconds are the time in
steps, without evaluations. Since a machine's speed changes over minutes, the ratio of the step
times is also measured by steps in turn. The script appends a JSON line for each run, and a summary,
to bench/results/recipe-DATE.jsonl, and draws the curves beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiedgpt.errors import DivergedError
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Line, Panel, usual_most
from tiedgpt.plots.training import reached
from tiedgpt.runtime import find_device
from tiedgpt.train import fast_training
from tiedgpt.train.dry_run import make_plan, prepare_fresh
from tiedgpt.train.events import Ended, Evaluated, Stepped
from tiedgpt.train.loop import Trainer
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.plan.sizes import SIZES
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.optim.groups import optimizers, parameter_groups
from tiedgpt.train.step.step import train_step
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.language import LanguageModelling
from tiedgpt.train.tasks.preparation import Prepared

MOST_EPOCHS = 4
POINTS = 20
CURVE_TOKENS = 16_384
FURTHER_RATES = 3
"""Rates tried beyond the lowest or the highest that were args."""


@dataclass
class Result:
    """A finished training and its result."""

    recipe: str
    seed: int
    lr: float
    share: float
    """Share of the peer's number of steps."""
    steps: int
    tokens: int = 0
    seconds: float = 0.0
    final: float = math.inf
    """Nats a token on all validation text; infinite where training diverged."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Tokens, seconds, nats on the first validation text."""

    def places(self, axis: int) -> tuple[list[float], list[float]]:
        """Return the curve over tokens (0) or seconds (1)."""
        return [point[axis] for point in self.curve], [point[2] for point in self.curve]

    def line(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return vars(self) | {"final": self.final if math.isfinite(self.final) else None}


def recipe(rule: str, schedule: str, base: Plan, *, lr: float, seed: int, share: float) -> Plan:
    steps = max(1, round(share * base.steps))
    return replace(
        base, optimizer=rule, schedule=schedule, lr=lr, seed=seed, steps=steps,
        warmup=round(base.warmup * steps / base.steps),
        eval_every=max(1, steps // POINTS), save_every=steps,
    )  # fmt: skip


peer = partial(recipe, "adamw", "cosine", share=1.0)
ours = partial(recipe, "muon", "linear")


def trained(prepared: Prepared, plan: Plan, share: float, scratch: str) -> Result:
    """Train by the loop of `tiedgpt train`, in a directory that is thrown away."""
    made = Result(f"{plan.optimizer}, {plan.schedule}", plan.seed, plan.lr, share, plan.steps)
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        try:
            for event in Trainer(
                prepared.task, prepared.data(prepared.config),
                Run(RunDirectory(Path(place)), prepared.config, plan),
            ).run():  # fmt: skip
                match event:
                    case Stepped():
                        made.seconds += (event.units - made.tokens) / event.units_per_second
                        made.tokens = event.units
                    case Evaluated():
                        made.curve.append((made.tokens, made.seconds, event.score.nats))
                    case Ended():
                        made.final = event.score.nats
                        lines = (Path(place) / "metrics.jsonl").read_text().splitlines()
                        part = json.loads(lines[-1])["part_val_loss"]
                        made.curve.append((made.tokens, made.seconds, part))
        except DivergedError as error:
            say(f"diverged: {error}")
    say(
        f"{made.recipe:<14} seed {made.seed} rate {made.lr:<7.2g} share {share:g}: "
        f"{made.final:.4f} nats after {made.tokens:,} tokens in {made.seconds:.0f} s"
    )
    return made


def tuned(prepared: Prepared, base: Plan, rates: list[float], seed: int, scratch: str):
    """Return a peer's runs, the best first; a best at the edge is looked beyond."""
    runs = [trained(prepared, peer(base, lr=lr, seed=seed), 1.0, scratch) for lr in sorted(rates)]
    for _ in range(FURTHER_RATES):
        best = min(runs, key=lambda run: run.final)
        if best is runs[-1]:
            runs.append(trained(prepared, peer(base, lr=2 * best.lr, seed=seed), 1.0, scratch))
        elif best is runs[0]:
            runs.insert(0, trained(prepared, peer(base, lr=best.lr / 2, seed=seed), 1.0, scratch))
        else:
            break
    return sorted(runs, key=lambda run: run.final)


def in_turn(prepared: Prepared, plans: dict[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps that the recipes do one after the other."""
    data = prepared.data(prepared.config)
    first = next(iter(plans.values()))
    batch_of = data.batches(first.batch_size, first.seed)
    steppers = {}
    for name, plan in plans.items():
        torch.manual_seed(0)
        model = prepared.task.build(prepared.config, data).to(find_device()).train()
        groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
        rules = optimizers(groups, lr=1e-5)
        steppers[name] = model, partial(train_step, model, rules, plan=plan)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds + 2):
        for name, (model, step) in steppers.items():
            began = time.perf_counter()
            with fast_training(model):
                step(batch_of(number))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return {name: times[2:] for name, times in seconds.items()}


def compared(theirs: Result, runs: list[Result]) -> dict[str, Any]:
    """Return what ours needed to be as good as the peer, of one seed."""
    enough = [run for run in runs if run.final <= theirs.final]
    found: dict[str, Any] = {
        "seed": theirs.seed,
        "peer's final loss": round(theirs.final, 4),
        "ours by share": {f"{run.share:g}": round(run.final, 4) for run in runs},
        "smallest share of tokens": None,
    }
    if enough:
        least = min(enough, key=lambda run: run.share)
        tokens, seconds = (reached(least.places(axis), theirs.curve[-1][2]) for axis in (0, 1))
        found |= {
            "smallest share of tokens": least.share,
            "share of seconds": round(least.seconds / theirs.seconds, 3),
            "its curve is there at a share of tokens": tokens and round(tokens / theirs.tokens, 3),
            "and of seconds": seconds and round(seconds / theirs.seconds, 3),
        }
    return found


def draw(path: Path, size: str, runs: list[tuple[str, Run]]) -> None:
    """Draw the curves of one seed, over tokens and over seconds."""
    panels = []
    for axis, label in enumerate(("tokens", "seconds in steps")):
        lines = tuple(Line(n, *run.places(axis), i, True) for i, (n, run) in enumerate(runs))
        panels.append(Panel("validation loss, nats", label, lines, most=usual_most(lines, 0.9)))
    save_figure(panels, path, f"{size}: the default recipe, and AdamW with cosine decay, tuned")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="tiny", choices=["tiny", "mini"])
    parser.add_argument("--epochs", type=float, default=MOST_EPOCHS, help="of the peer, at most 4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.5, 0.6])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    args = parser.parse_args()
    if not 0 < args.epochs <= MOST_EPOCHS:
        parser.error(f"--epochs {args.epochs} is not above 0 and at most {MOST_EPOCHS}")
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainOptions(size=args.size, steps=1)
        run = RunDirectory(Path(scratch) / "data")
        prepared = prepare_fresh(LanguageModelling(options), run)
        data = prepared.facts
        assert data.text_tokens is not None
        row_tokens = (options.batch_size or SIZES[args.size].batch_size) * data.row_tokens
        steps = max(POINTS, int(args.epochs * data.text_tokens / row_tokens))
        whole_task = LanguageModelling(replace(options, steps=steps))
        base = make_plan(replace(prepared, task=whole_task))
        rows = -(-CURVE_TOKENS // data.row_tokens)
        base = replace(base, eval_batches=-(-rows // base.micro_batch))
        default = SIZES[args.size].lr
        plans = {
            "ours": ours(base, lr=default, seed=0, share=1.0),
            "peer": peer(base, lr=args.rates[0], seed=0),
        }
        times = in_turn(prepared, plans, 30)
        step = {name: statistics.median(seconds) for name, seconds in times.items()}
        peers = len(args.rates) + len(args.seeds) - 1
        whole = peers * step["peer"] + len(args.seeds) * sum(args.shares) * step["ours"]
        tokens_per_second = {name: round(row_tokens / seconds) for name, seconds in step.items()}
        say(
            f"{args.size}: {steps:,} steps of {row_tokens:,} tokens, {tokens_per_second} tokens/s;"
            f" all in all about {1.1 * whole * steps / 60:.0f} minutes"
        )
        if args.estimate:
            return
        args.results.mkdir(exist_ok=True)
        path = args.results / f"recipe-{time.strftime('%Y-%m-%d')}.jsonl"
        same = {"size": args.size, "date": time.strftime("%Y-%m-%d")}

        def note(line: dict[str, Any]) -> None:
            with path.open("a") as file:
                file.write(json.dumps(same | line) + "\n")

        peers_of_first = tuned(prepared, base, args.rates, args.seeds[0], scratch)
        for each in peers_of_first:
            note(each.line())
        per_seed, drawn = [], None
        for seed in args.seeds:
            theirs = peers_of_first[0]
            if seed != args.seeds[0]:
                theirs = trained(prepared, peer(base, lr=theirs.lr, seed=seed), 1.0, scratch)
                note(theirs.line())
            runs = []
            for share in sorted(args.shares):
                plan = ours(base, lr=default, seed=seed, share=share)
                runs.append(trained(prepared, plan, share, scratch))
                note(runs[-1].line())
            per_seed.append(compared(theirs, runs))
            drawn = drawn or [
                (f"AdamW, cosine, {theirs.lr:g}", theirs),
                *((f"ours, {run.share:g} of the steps", run) for run in runs),
            ]
    draw(path.with_name(f"{path.stem}-{args.size}.png"), args.size, drawn or [])
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {find_device()}",
        "torch": torch.__version__,
        "model": f"{args.size}, {prepared.config.parameter_count():,} parameters, {base.dtype}",
        "tokens of the peer": steps * row_tokens,
        "epochs of the peer": round(steps * row_tokens / data.text_tokens, 2),
        "peer's rates": {f"{run.lr:g}": round(run.final, 4) for run in peers_of_first},
        "our rate": default,
        "time of a step, ours to the peer's (median, in turn)": round(
            statistics.median(a / b for a, b in zip(times["ours"], times["peer"], strict=True)), 3
        ),
        "seeds": per_seed,
    }
    note(result)
    print(json.dumps(same | result, indent=2))


if __name__ == "__main__":
    main()
