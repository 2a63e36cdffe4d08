"""`tiedgpt train DATA --compare OPTIONS --compare OPTIONS`: recipes on the same data and seed.

Each is a run of its own in a directory under --out, so that the same command again goes on where it
was stopped. The first decides how long all train, unless they say it themselves.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tiedgpt.cli.console import console, fact, note, table
from tiedgpt.cli.options import parse
from tiedgpt.cli.plot import as_training, duration, label
from tiedgpt.cli.show_training import Show
from tiedgpt.cli.source import program
from tiedgpt.cli.train import ABOUT, Arguments, train_run
from tiedgpt.errors import EXIT_OK, DivergedError, UserError
from tiedgpt.files import replacing
from tiedgpt.plots.terminal import print_panels
from tiedgpt.plots.training import VALIDATION, reached, validation_key, validation_panel
from tiedgpt.train.history import History, read_history
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.runs import RUNS, run_name
from tiedgpt.train.schedule import Growth

FORMS: tuple[Callable[[Any], str], ...] = (
    str, "{:.4f}".format, "{:,}".format, duration, "{:,.0f}".format, duration,
)  # fmt: skip
"""How the numbers of a recipe are shown."""
SAME = (
    "data", "val", "task", "text_field", "seed", "fork", "out", "track", "find_lr",
    "verify_resume", "parallel", "verbose", "format",
)  # fmt: skip
"""What belongs to all recipes."""
TOKENS_FROM = ("data", "val", "text_field", "task", "tokenizer", "start")
"""What decides the tokens that a run is trained on."""


@dataclass(frozen=True)
class Recipe:
    """Options that are compared, and where they are trained."""

    name: str
    options: TrainOptions
    out: Path
    says_length: bool
    """Whether it says itself how long it trains."""


def compare(given: Arguments, command: str) -> int:
    """Train each recipe, draw the curves, and say who gets where; return the exit code.

    A recipe that diverges is left as it is, and its `DivergedError` is raised at the end.
    """
    recipes = read_recipes(given)
    display = Show(verbose=given.verbose, results=False)
    diverged: DivergedError | None = None
    for recipe in recipes:
        options = recipe.options
        if recipe is not recipes[0] and not recipe.says_length:
            options = as_long(options, recipes[0])
        fact("\nrecipe", recipe.name, to=console(stderr=True))
        take = partial(take_data, recipes[0], options)
        try:
            code = train_run(
                options, recipe.out, command, display, track=given.track, before_data=take
            )
        except DivergedError as error:
            diverged, code = error, EXIT_OK
        if code != EXIT_OK:
            return code
    show([read_history(recipe.out, recipe.name) for recipe in recipes], given.format)
    note(f"`{program()} plot {recipes[0].out.parent} --out curves.png` draws a figure")
    if diverged is not None:
        raise diverged
    return EXIT_OK


def read_recipes(given: Arguments) -> list[Recipe]:
    """Return the recipes that --compare names; one alone is compared with the options as given."""
    base = replace(given, compare=())
    out = Path(given.out or RUNS / f"{run_name(given.options())}-compared")
    if (out / "run.toml").exists():
        raise UserError(
            f"{out} is a run itself", hint="give --out another directory for the comparison"
        )
    recipes: list[Recipe] = []
    if len(given.compare) == 1:
        recipes.append(
            Recipe("as given", _sized(base.options()), out / "as-given", says_length=False)
        )
    for text in given.compare:
        try:
            arguments = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--compare {text!r} cannot be split into options: {error}") from None
        one = parse(Arguments, "train --compare", arguments, ABOUT, base=base)
        for name in SAME:
            if getattr(one, name) != getattr(base, name):
                raise UserError(
                    f"--compare {text!r}: --{name.replace('_', '-')} must be the same for all",
                    hint="give it outside of --compare",
                )
        says_steps, says_minutes = one.steps != base.steps, one.minutes != base.minutes
        if says_steps or says_minutes:  # one of the two replaces the other
            steps = one.steps if says_steps else None
            one = replace(one, steps=steps, minutes=one.minutes if says_minutes else None)
        letters = "".join(c if c.isalnum() or c == "." else " " for c in text)
        slug = "-".join(letters.split())[:60] or "recipe"
        if any(recipe.out == out / slug for recipe in recipes):
            slug += f"-{len(recipes) + 1}"
        says_length = says_steps or says_minutes
        recipes.append(Recipe(text, _sized(one.options()), out / slug, says_length))
    return recipes


def _sized(options: TrainOptions) -> TrainOptions:
    """Have recipes of fresh models be of one size, so that only what is asked for differs."""
    return options if options.continues else replace(options, size=options.named_size)


def as_long(options: TrainOptions, first: Recipe) -> TrainOptions:
    """Return options that train on as many tokens as the first recipe did."""
    if options.steps is not None:
        return options
    steps = RunDirectory(first.out).read_record()["training"]["steps"]
    theirs, ours = _tokens(first.options), _tokens(options)
    return replace(options, steps=max(1, round(steps * theirs / ours)), minutes=None)


def _tokens(options: TrainOptions, steps: int = 1000) -> int:
    """Return the tokens of so many steps, or what stands in their proportion."""
    rows = options.rows
    growth = Growth(
        batch_size=rows,
        micro_batch=rows,
        row_units=options.context or options.shape.n_positions,
        batch_warmup=round(options.batch_warmup * steps),
        length_warmup=round(options.length_warmup * steps),
    )
    return growth.units_before(steps)


def take_data(first: Recipe, options: TrainOptions, run: RunDirectory) -> None:
    """Put the first recipe's tokenizer and tokens into a run that would make the same."""
    equal = all(getattr(first.options, name) == getattr(options, name) for name in TOKENS_FROM)
    if not equal or first.out == run.path or _vocabulary(first.options) != _vocabulary(options):
        return
    for name in ("tokenizer", "data"):
        if (first.out / name).is_dir():
            with replacing(run.path / name) as temporary:
                shutil.copytree(first.out / name, temporary, copy_function=_link)


def _vocabulary(options: TrainOptions) -> int | None:
    fresh = options.tokenizer == "bpe" and options.start is None
    return options.vocab_size or (options.shape.vocab_size if fresh else None)


def _link(source: str, target: str) -> None:
    """Have both runs use one file: shards are never written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def show(histories: Sequence[History], form: str) -> None:
    """Draw validation by tokens, and show where each recipe ends and when it gets to the others."""
    trainings = [as_training(history, "tokens") for history in histories]
    key, unit = validation_key(trainings), label(histories, "tokens")
    target = max((t.curves[key][1][-1] for t in trainings if key in t.curves), default=0.0)
    found = []
    for history in histories:
        units, seconds = (reached(history.series(key, x), target) for x in ("tokens", "seconds"))
        found.append(
            {
                "recipe": history.name,
                key: history.last(key),
                unit: history.units,
                "seconds": history.seconds,
                f"{unit}_to_{target:.3f}": units,
                f"seconds_to_{target:.3f}": seconds,
            }
        )
    if form == "json":
        print(json.dumps(found, indent=1))
        return
    print_panels([validation_panel(trainings, unit)])
    shown = [
        ["" if x is None else form(x) for form, x in zip(FORMS, line.values(), strict=True)]
        for line in found
    ]
    names = "recipe", VALIDATION[key], unit, "time", f"{unit} to {target:.3f}", "time"
    table([names[0], *(f">{name}" for name in names[1:])], shown)
    console().print(
        f"{target:.3f} is where the last of them ends on the part of the held-out data that is "
        "scored in\nbetween; the final score is of all of it. Time is that of steps."
    )
