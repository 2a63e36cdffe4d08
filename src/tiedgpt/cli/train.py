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
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.program import program
from tiedgpt.errors import EXIT_INTERRUPTED, EXIT_OK, TiedGPTError, UserError
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.tracking import TrackerName

if TYPE_CHECKING:
    from tiedgpt.train.parallel import Parallel, World
    from tiedgpt.train.plan import Plan
    from tiedgpt.train.run_directory import RunDirectory
    from tiedgpt.train.tasks.labelled import Labelled
    from tiedgpt.train.tasks.language import LanguageModelling

PROCESSES = "TORCHELASTIC_RUN_ID"
"""What torchrun sets in the environment of the processes that it starts."""

ABOUT = """Train a GPT on your text, or --start from one that was trained already.

With --task, train a head on its body from examples in .jsonl, one a line:
  classify  {"text": ..., "label": ...}
  tag       {"tokens": [...], "labels": [...]} or {"text": ..., "labels": [[from, to, label]]}
  choose    {"text": ..., "choices": [...], "answer": 0}
  answer    {"question": ..., "context": ..., "answer": ...}

The same command again goes on where the last one stopped."""


@dataclass(frozen=True, kw_only=True)
class Arguments(TrainOptions):
    """Train a GPT. The same command again goes on where the last one stopped."""

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Text files, folders, globs, .jsonl, or - for standard input; none: Python's own docs."""
    out: str | None = None
    """The run's directory; default: runs/ and a name from the data and the size."""
    track: TrackerName | None = None
    """Send the metrics to a tracker, too: trackio, wandb or tensorboard."""
    compare: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="'OPTIONS'")
    ] = ()
    """Train once for each --compare, with these options beside the others, and draw both curves."""
    find_lr: bool = False
    """Only look for a learning rate, in a short sweep over rising ones; nothing is left behind."""
    verify_resume: bool = False
    """Only prove, in a few steps, that a killed and resumed run equals an unbroken one here."""

    parallel: Literal["ddp", "fsdp"] | None = None
    """Under torchrun: ddp, the default, has the model in each process; fsdp shares it out."""

    def __post_init__(self) -> None:
        """Leave the checks to `TrainOptions`, whose errors are one line."""

    def options(self) -> TrainOptions:
        """Return what decides the run, checked."""
        names = (option.name for option in fields(TrainOptions))
        return TrainOptions(**{name: getattr(self, name) for name in names})


def run(arguments: list[str]) -> int:
    """Train; return the exit code."""
    with once_for_all():
        given = parse(Arguments, "train", with_recipes(arguments), ABOUT)
        options = given.options()
        if PROCESSES in os.environ or given.parallel is not None:
            require_processes(given)
    out = Path(given.out) if given.out else default_out(options)
    command = f"{program()} train {shlex.join(arguments)}".rstrip()
    if given.verify_resume:
        from tiedgpt.cli.verify_resume import verify_resume

        return verify_resume(options, out)
    if given.find_lr:
        from tiedgpt.cli.find_rate import find_rate

        return find_rate(options)
    if given.compare:
        from tiedgpt.cli.compare import compare

        return compare(given, command)
    return train_run(options, out, command, track=given.track, parallel=given.parallel)


def train_run(
    options: TrainOptions,
    out: Path,
    command: str,
    *,
    track: TrackerName | None = None,
    parallel: Parallel | None = None,
    before_data: Callable[[RunDirectory], None] | None = None,
    show_end: bool = True,
) -> int:
    """Train in the directory `out`, or go on there; return the exit code.

    `before_data` is called before a fresh run's data are prepared, and may put them there.
    """
    from tiedgpt.train.parallel import joined
    from tiedgpt.train.plan import training_device

    with joined(parallel, training_device()) as world:
        return _train_in(
            world, options, out, command, track=track, before_data=before_data, show_end=show_end
        )


def _train_in(
    world: World,
    options: TrainOptions,
    out: Path,
    command: str,
    *,
    track: TrackerName | None,
    before_data: Callable[[RunDirectory], None] | None,
    show_end: bool,
) -> int:
    from tiedgpt.cli.show_training import Display
    from tiedgpt.train.events import Ended
    from tiedgpt.train.plan import make_plan, record, recorded
    from tiedgpt.train.run_directory import RunDirectory
    from tiedgpt.train.sources import fork_options, open_sources, prepare
    from tiedgpt.train.tracking import Tracking, open_tracker
    from tiedgpt.train.trainer import Trainer

    directory = RunDirectory(out)
    display = Display(out, command=command, silent=not world.leads)
    for what, source in (("tokenizer", options.tokenizer), ("model", options.start)):
        if source not in (None, "bpe", "char") and not Path(source).exists():
            display.say(f"{what} {source}: looked for on the Hugging Face hub")

    def ready() -> Ready | None:
        """Prepare the data, or find what was prepared; None where the run is finished."""
        tables = directory.read_record()
        if tables and (differences := options.differences(tables.get("options", {}))):
            raise UserError(
                f"{out} holds a run of other options ({'; '.join(differences)}): give the same "
                f"options to go on, or another --out, with --fork {out} to begin where it stands"
            )
        sources = open_sources(options) if options.data or not tables else None
        digest = sources.digest() if sources and options.data and world.leads else None
        if tables and world.leads and digest != tables.get("text", {}).get("sha256"):
            raise UserError(
                f"the text is another than when {out} began: give another --out, or the same text"
            )
        config, plan = recorded(tables) if tables else (None, None)
        if tables and directory.finished():
            display.say(f"{out} finished already; generate from it, or train in another --out")
            return None
        asked = fork_options(options, tables)
        if before_data is not None and not tables:
            before_data(directory)
        with display.encoding() as progress:
            sources = sources or open_sources(options)
            task = prepare(directory, asked, sources, config, progress)
        return Ready(asked, task, plan, digest)

    tracker = open_tracker(track) if track is not None and world.leads else None
    with directory.locked() if world.leads else contextlib.nullcontext():
        found = world.after_first(ready)
        if found is None:
            return EXIT_OK
        task, plan, device = found.task, found.plan, world.device
        if plan is None:
            display.say("measuring this machine")
            plan = make_plan(found.asked, task, device, world=world)
            tables = record(options, task.config, plan, task.counted, found.digest, world)
            world.lead(lambda: directory.write_record(tables))
        display.plan(options, plan, task, world)
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(stop_on_signals())
            stack.enter_context(display.training(plan))
            tracking = None
            if track is not None and tracker is not None:
                tables = directory.read_record()
                tracking = stack.enter_context(
                    Tracking(track, tracker, out, tables, warn=display.say)
                )
            fork = Path(options.fork) / "checkpoints" if options.fork is not None else None
            trainer = Trainer(
                directory,
                task,
                plan,
                device,
                fork=fork,
                stop_requested=stop.requested,
                track=tracking.log if tracking is not None else None,
                world=world,
            )
            for event in trainer.run():
                display.event(event)
                if isinstance(event, Ended):
                    ended = event
        if not ended.finished:
            display.interrupted(ended, plan)
            return EXIT_INTERRUPTED
        if show_end and world.leads:
            display.finished(directory, options, task, ended)
    return EXIT_OK


@dataclass(frozen=True)
class Ready:
    """What a run needs before its first step, or before it goes on."""

    asked: TrainOptions
    """The options; a fork's with what it has from the run that it begins from."""
    task: LanguageModelling | Labelled
    plan: Plan | None
    """Of a run that goes on."""
    digest: str | None


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


def require_processes(given: Arguments) -> None:
    """Raise `UserError` for what does not go with how many processes were started."""
    from tiedgpt.train.parallel import launched, require_launch

    require_launch(given.parallel)
    for name in ("verify_resume", "find_lr", "compare"):
        if launched() and getattr(given, name):
            raise UserError(f"--{name.replace('_', '-')} is for one process: leave out torchrun")


def with_recipes(arguments: list[str]) -> list[str]:
    """Return the arguments with what follows --compare tied to it: it begins with a dash itself."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--compare":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def default_out(options: TrainOptions) -> Path:
    """Return runs/NAME-SIZE or, of other tasks and starts, runs/NAME-TASK, NAME from the data."""
    first = options.data[0] if options.data else "python-docs"
    path = Path(os.path.abspath(first))
    stem = "stdin" if first == "-" else path.stem
    if not any(c.isalnum() for c in stem) or set(stem) & set("*?["):  # a glob: its folder's name
        stem = next((p.name for p in path.parents if p.name.isprintable() and p.name.isalnum()), "")
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).strip("-.") or "data"
    kind = options.size if options.task == "lm" and options.start is None else options.task
    kind = kind if options.fork is None else "fork"
    return Path("runs") / f"{name}-{kind}"


class stop_on_signals:
    """SIGINT and SIGTERM ask to stop after the step; a second one ends the process at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, object] = {}

    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._asked

    def __enter__(self) -> stop_on_signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
