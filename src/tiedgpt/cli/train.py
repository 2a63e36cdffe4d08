"""`tiedgpt train [DATA...]`: prepares, plans, trains, and shows it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from tiedgpt.cli.console import bar
from tiedgpt.cli.options import Positional, parse
from tiedgpt.cli.source import program
from tiedgpt.errors import EXIT_INTERRUPTED, EXIT_OK, TiedGPTError, UserError
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.runs import make_longer, run_for, times_longer
from tiedgpt.train.tracking import TrackerName, Tracking, open_tracker

if TYPE_CHECKING:
    from tiedgpt.cli.show_training import Display, Show
    from tiedgpt.train.events import Ended
    from tiedgpt.train.parallel import Parallel
    from tiedgpt.train.schedule import Plan
    from tiedgpt.train.sources import Sources, Trained
    from tiedgpt.train.trainer import Trainer

PROCESSES = "TORCHELASTIC_RUN_ID"
"""What torchrun sets in the environment of the processes that it starts."""

ABOUT = """Train a GPT on your text, from scratch or from a trained model (--start).

With --task, train another head on labelled examples, one JSON object per line:
  classify  {"text": ..., "label": ...}
  tag       {"tokens": [...], "labels": [...]}
            or {"text": ..., "labels": [[from, to, label]]}
  choose    {"text": ..., "choices": [...], "answer": 0}
  answer    {"question": ..., "context": ..., "answer": ...}

To resume a stopped run, give the same command again."""
GROUPS = {
    "data": "task val text_field encoding tokenizer vocab_size",
    "model": "size start fork width context dropout window bias freeze untie_at",
    "time": "minutes steps epochs eval_every patience keep",
    "optimization": "optimizer lr schedule warmup cooldown batch_size weight_decay grad_clip seed",
    "memory and speed": "device memory micro_batch recompute dtype compile parallel",
    "output": "out sample_prompt verbose format track",
}


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Options of `train` and `tune` that do not decide the weights."""

    out: str | None = None
    """The run's directory; default: runs/NAME-1, or -2 and so on for other options."""
    track: TrackerName | None = None
    """Also send the metrics to this tracker."""
    verbose: bool = False
    """Also show the schedule and the parameter groups."""
    format: Literal["human", "json"] = "human"
    """json: one object with the result, on stdout."""
    parallel: Literal["ddp", "fsdp"] | None = None
    """With torchrun: ddp keeps the whole model in each process, fsdp shards it; default: ddp."""

    def __post_init__(self) -> None:
        """Leave the checks to `TrainOptions`, whose errors are one line."""

    def require_processes(self) -> None:
        """Raise `UserError` for what does not go with how many processes were started."""
        if PROCESSES not in os.environ and self.parallel is None:
            return
        from tiedgpt.train.parallel import require_launch

        require_launch(self.parallel)

    def run(self, options: TrainOptions, command: str) -> int:
        """Train; return the exit code."""
        out = Path(self.out) if self.out else None
        from tiedgpt.cli.show_training import Show

        show = Show(verbose=self.verbose, format=self.format)
        return train_run(options, out, command, show, track=self.track, parallel=self.parallel)


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments, TrainOptions):
    """Train a GPT. To resume a stopped run, give the same command again."""

    data: Positional[tuple[str, ...]] = ()
    """Text files, folders, globs, .jsonl, or - for standard input; default: Python's own docs."""

    def options(self) -> TrainOptions:
        """Return what decides the run, checked."""
        names = (option.name for option in fields(TrainOptions))
        return TrainOptions(**{name: getattr(self, name) for name in names})


def run(arguments: list[str]) -> int:
    """Train; return the exit code."""
    with once_for_all():
        given = parse(Arguments, "train", arguments, ABOUT, groups=GROUPS)
        options = given.options()
        given.require_processes()
    command = f"{program()} train {shlex.join(arguments)}".rstrip()
    return given.run(options, command)


def train_run(
    options: TrainOptions,
    out: Path | None,
    command: str,
    show: Show,
    *,
    track: TrackerName | None = None,
    parallel: Parallel | None = None,
) -> int:
    """Train in the directory `out`, or go on there; return the exit code.

    `out` None is the run that these options mean, or a new one.
    """
    from tiedgpt.cli.show_training import Display
    from tiedgpt.train.parallel import joined
    from tiedgpt.train.plan import make_plan, record, training_device
    from tiedgpt.train.sources import open_sources
    from tiedgpt.train.trainer import Trainer

    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined(parallel, training_device(options.device)))
        if out is not None:
            world.lead(lambda: require_same(options, RunDirectory(out)))
        sources = world.after_first(lambda: open_sources(options) if options.data else None)
        digest = world.lead(lambda: sources.digest() if sources is not None else None)
        directory = RunDirectory(out or world.lead(lambda: run_for(options, digest)))
        display = Display(directory.path, show, silent=not world.leads)
        start = open_tracker(track) if track is not None and world.leads else None
        if world.leads:
            stack.enter_context(directory.locked())
        found = world.after_first(lambda: prepared(options, directory, display, sources, digest))
        if found is None:
            display.say(
                f"{directory.path} is finished: `{program()} generate {directory.path}` "
                "generates text; more --minutes, --steps or --epochs continue the training"
            )
            return EXIT_OK
        asked, task, plan = found
        if plan is None:
            display.say("measuring this machine")
            plan = make_plan(asked, task, world.device, world=world)
            tables = record(options, task.config, plan, task.counted, digest, world)
            world.lead(lambda: directory.write_record(tables))
        display.plan(options, plan, task, world)
        tracking = None
        if track is not None and start is not None:
            tracking = Tracking(
                track, start, directory.path, directory.read_record(), warn=display.say
            )
        fork = Path(options.fork) / "checkpoints" if options.fork is not None else None
        trainer = Trainer(directory, task, plan, world.device, fork=fork, world=world)
        ended = shown(trainer, display, tracking)
        if not ended.finished:
            steps = trainer.plan.steps
            display.say(f"stopped and saved after step {ended.step:,} of {steps:,}; to resume:")
            display.err.print(f"  {command}")
            return EXIT_INTERRUPTED
        if world.leads:
            display.finished(directory, options, task, ended)
    return EXIT_OK


def shown(trainer: Trainer, display: Display, tracking: Tracking | None) -> Ended:
    """Train, show and track what happens; return how it ended."""
    from tiedgpt.train.events import Ended

    with contextlib.ExitStack() as training:
        trainer.stop_requested = training.enter_context(stop_on_signals())
        training.enter_context(display.training(trainer.plan))
        trainer.track = training.enter_context(tracking).log if tracking is not None else None
        for event in trainer.run():
            display.event(event)
    assert isinstance(event, Ended)
    return event


def prepared(
    options: TrainOptions,
    directory: RunDirectory,
    display: Display,
    sources: Sources | None,
    digest: str | None,
) -> tuple[TrainOptions, Trained, Plan | None] | None:
    """Return the options, a fork's with what it has from its run, the task and the plan.

    The plan is None for a fresh run. Returns None for a run that is finished.
    """
    from tiedgpt.train.plan import recorded
    from tiedgpt.train.sources import adapt_options, fork_options, open_sources, prepare

    for source in (options.tokenizer, options.start):
        if source not in (None, "bpe", "char") and not Path(source).exists():
            display.say(f"{source}: not a path, looking on the Hugging Face hub")
    out, tables = directory.path, directory.read_record()
    if tables and digest != tables.get("text", {}).get("sha256"):
        raise UserError(
            f"the text has changed since {out} began", hint="give another --out, or the same text"
        )
    if (times := require_same(options, directory)) is not None:
        tables = make_longer(directory, options, times)
    config, plan = recorded(tables) if tables else (None, None)
    if tables and directory.finished():
        return None
    asked = fork_options(options, tables)
    sources = sources or open_sources(options)
    asked = adapt_options(asked, sources)
    with bar("reading text", to=display.err) as progress:
        task = prepare(directory, asked, sources, config, progress)
    return asked, task, plan


def require_same(options: TrainOptions, directory: RunDirectory) -> float | None:
    """Raise `UserError` where a run has other options; return how many times as long it goes on."""
    out, tables = directory.path, directory.read_record()
    differences = options.differences(tables.get("options", {})) if tables else []
    times = times_longer(options, tables) if differences and directory.finished() else None
    if differences and times is None:
        raise UserError(
            f"{out} holds a run with other options ({'; '.join(differences)})",
            hint=(
                f"give the same options to resume, or another --out, with --fork {out} to begin "
                "from its weights"
            ),
        )
    return times


@contextlib.contextmanager
def once_for_all() -> Iterator[None]:
    """Let the first of several processes alone say what is wrong with a command."""
    if os.environ.get("RANK", "0") == "0" or PROCESSES not in os.environ:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                yield
            except TiedGPTError as error:
                raise SystemExit(error.exit_code) from None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Have SIGINT and SIGTERM ask to stop after the step; a second one ends the process at once.

    Yields whether one has come.
    """
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
