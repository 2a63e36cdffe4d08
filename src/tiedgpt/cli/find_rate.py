"""`tiedgpt train ... --find-lr`: rising rates, their losses drawn, and what to try."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiedgpt.errors import EXIT_OK, UserError
from tiedgpt.train.options import TrainOptions

if TYPE_CHECKING:
    from tiedgpt.train.plan import Plan
    from tiedgpt.train.rates import Sweep

ROWS = 12


def find_rate(options: TrainOptions) -> int:
    """Sweep on the run's own model and batches, show what came of it; leave nothing behind."""
    if options.fork is not None:
        raise UserError(
            "--find-lr looks for the rate of a run from its beginning: leave out --fork"
        )
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from tiedgpt.train.plan import make_plan, training_device
    from tiedgpt.train.rates import STEPS, sweep
    from tiedgpt.train.run_directory import RunDirectory
    from tiedgpt.train.sources import open_sources, prepare

    device = training_device()
    columns = TextColumn("{task.description}"), BarColumn()
    with (
        tempfile.TemporaryDirectory(prefix="tiedgpt-find-lr-") as scratch,
        Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress,
    ):
        bar = progress.add_task("reading text", total=None)

        def update(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        run = RunDirectory(Path(scratch))
        task = prepare(run, options, open_sources(options), None, update)
        plan = make_plan(replace(options, steps=STEPS, minutes=None), task, device)
        progress.update(bar, description="trying rates")
        found = sweep(task, plan, device, progress=update)
    show(found, plan, task.config.n_embd, given=options.lr is not None)
    return EXIT_OK


def show(found: Sweep, plan: Plan, width: int, *, given: bool) -> None:
    """Draw the losses over the rates; say what to try here and at other widths, by which rules."""
    from rich.console import Console

    from tiedgpt.plots.panel import Line, Panel
    from tiedgpt.plots.terminal import draw
    from tiedgpt.train.rates import BELOW_LOWEST, HIGHEST, STEPS
    from tiedgpt.train.schedule import WIDTH_EXPONENTS, transferred_rate

    console = Console(highlight=False)
    most = found.losses[0] + 0.25 * (found.losses[0] - min(found.smoothed))
    lines = (Line("loss, smoothed", found.rates, found.smoothed),)
    panel = Panel("loss before the step, smoothed", "rate", lines, log_x=True, most=most)
    console.print(draw(panel, width=min(console.width, 120), height=ROWS), soft_wrap=True)
    ended = (
        f"; ended at {found.rates[-1]:.2g}, where the loss ran away"
        if found.rates[-1] < HIGHEST and len(found.rates) < STEPS
        else ""
    )
    transferred = partial(transferred_rate, found.suggestion, width=width, rule=plan.optimizer)
    wider = [f"{transferred(to=to):.2g} at {to:,}" for to in (2 * width, 4 * width)]
    console.print(
        f"lowest    {min(found.smoothed):.3f} at a rate of {found.lowest:.2g} "
        f"(the first was {found.losses[0]:.3f}){ended}\n"
        f"try       --lr {found.suggestion:g}: 1/{BELOW_LOWEST:g} of the rate at which the loss "
        "was lowest; a long run may want less\n"
        f"{'given' if given else 'default':<9} {plan.lr:g}\n"
        f"wider     {', '.join(wider)} (width^-{WIDTH_EXPONENTS[plan.optimizer]:g}, the rule for "
        f"{plan.optimizer})",
        soft_wrap=True,
    )
