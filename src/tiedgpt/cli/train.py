"""`tiedgpt train [DATA...]`: prepare the data, plan, train, and show the progress."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from tiedgpt.cli.console import note, note_compilation
from tiedgpt.cli.options import parse
from tiedgpt.cli.run_arguments import PROCESSES, RunArguments
from tiedgpt.cli.source import has_unread_input, program
from tiedgpt.errors import EXIT_INTERRUPTED, EXIT_OK, TiedGPTError
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.options import TrainOptions

ABOUT = """Train a GPT on your text, from scratch or from a trained model (--start).

With --task, train another head on labelled examples, one JSON object per line:
  classify  {"text": ..., "label": ...}
  choose    {"text": ..., "choices": [...], "answer": 0}
  regress   {"text": ..., "number": 3.5}

To resume a stopped run, give the same command again."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `tiedgpt train`."""

    options: TrainOptions
    run: RunArguments


def run(arguments: list[str]) -> int:
    """Train; return the exit code."""
    with report_once():
        args = parse(Arguments, "train", arguments, ABOUT)
        if not args.options.data and has_unread_input():
            note("standard input is not read: `tiedgpt train -` trains on it")
    return show_run(args.options, args.run, "train", arguments)


def show_run(options: RunOptions, args: RunArguments, verb: str, arguments: list[str]) -> int:
    """Train and show the progress; return the exit code.

    The verb and its `arguments` are the command that resumes a stopped run.
    """
    if args.dry_run:
        from tiedgpt.cli.show_plan import show_plan

        show_plan(options, args)
        return EXIT_OK
    began = time.perf_counter()  # importing torch is part of --minutes
    gc.disable()  # torch makes 280,000 objects: visiting them would take a fifth of its import
    try:
        from tiedgpt.cli.show_training import Display
        from tiedgpt.train.events import AlreadyFinished, Ended, Planned
        from tiedgpt.train.run import train
        from tiedgpt.train.store.metrics import Tracking, open_tracker
    finally:
        gc.freeze()  # exclude these objects from later collections
        gc.enable()
    display = Display(args, began, silent=not is_main())
    tracker = open_tracker(args.track) if args.track is not None and is_main() else None
    stop = threading.Event()
    tracking: Tracking | None = None
    with note_compilation("training", display.err), contextlib.ExitStack() as stack:
        stack.enter_context(display.reading())
        for event in train(
            options,
            args.out,
            parallel=args.parallel,
            threads=args.threads,
            stop_requested=stop.is_set,
            began=began,
        ):
            if isinstance(event, Planned):
                stack.pop_all().close()
                stack.enter_context(set_on_signals(stop))
                if tracker is not None:
                    run = event.directory
                    tracking = Tracking(
                        args.track or "", tracker, run.path, run.read_record(), warn=display.say
                    )
                    stack.enter_context(tracking)
                stack.enter_context(display.training(event.plan))
            line = getattr(event, "line", None)
            if tracking is not None and line:
                tracking.log(line)
            display.event(event)
    assert isinstance(event, Ended | AlreadyFinished)
    if isinstance(event, Ended) and not event.finished:
        display.show_stop(event, f"{program()} {shlex.join([verb, *arguments])}")
        return EXIT_INTERRUPTED
    if is_main():
        display.show_end(event)
    return EXIT_OK


def is_main() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0" or PROCESSES not in os.environ


@contextlib.contextmanager
def report_once() -> Iterator[None]:
    """Report an error of the command in the first of several processes only."""
    if is_main():
        yield
        return
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                yield
            except TiedGPTError as error:
                raise SystemExit(error.exit_code) from None


@contextlib.contextmanager
def set_on_signals(event: threading.Event) -> Iterator[None]:
    """Set an event on SIGINT or SIGTERM inside the block; a second signal ends the process.

    Its exit code is then 130 or 143 in a shell: 128 plus the number of the signal.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        for caught in before:
            signal.signal(caught, signal.SIG_DFL)
        event.set()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
