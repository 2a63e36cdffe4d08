"""`tiedgpt train ... --find-lr`: rising rates, their losses drawn, and what to try."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tiedgpt.cli.console import bar, fact
from tiedgpt.errors import UserError
from tiedgpt.plots.panel import Line, Panel
from tiedgpt.plots.terminal import print_panels
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.plan import make_plan, training_device
from tiedgpt.train.rates import BELOW_LOWEST, Sweep, sweep
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.schedule import WIDTH_EXPONENTS, Plan, transferred_rate
from tiedgpt.train.sources import open_sources, prepare


def find_rate(options: TrainOptions) -> None:
    """Sweep on the run's own model and batches, show what came of it; leave nothing behind."""
    if options.fork is not None:
        raise UserError(
            "--find-lr looks for the rate of a run from its beginning", hint="leave out --fork"
        )
    device = training_device(options.device)
    with tempfile.TemporaryDirectory(prefix="tiedgpt-find-lr-") as scratch:
        run = RunDirectory(Path(scratch))
        with bar("reading text") as update:
            task = prepare(run, options, open_sources(options), None, update)
        plan = make_plan(options, task, device)  # of the size that the run would have
        with bar("trying rates") as update:
            found = sweep(task, plan, device, progress=update)
    show(found, plan, task.config.n_embd, given=options.lr is not None)


def show(found: Sweep, plan: Plan, width: int, *, given: bool) -> None:
    """Draw the losses over the rates; say what to try here and at other widths, by which rules."""
    first, lowest, rule = found.losses[0], min(found.smoothed), plan.optimizer
    lines = (Line("loss", found.rates, found.smoothed),)
    most = first + 0.25 * (first - lowest)
    print_panels([Panel("loss before the step, smoothed", "rate", lines, log_x=True, most=most)])
    wider = ", ".join(
        f"{transferred_rate(found.suggestion, width=width, to=to, rule=rule):.2g} at {to:,}"
        for to in (2 * width, 4 * width)
    )
    fact("lowest", f"{lowest:.3f} at a rate of {found.lowest:.2g} (the first was {first:.3f})")
    fact(
        "try",
        f"--lr {found.suggestion:g}: 1/{BELOW_LOWEST:g} of the rate at which the loss was lowest; "
        "a long run may want less",
    )
    fact("model", f"{plan.size or 'as begun with'}, {width:,} wide")
    fact("given" if given else "default", f"{plan.lr:g}")
    fact("wider", f"{wider} (width^-{WIDTH_EXPONENTS[rule]:g}, the rule for {rule})")
