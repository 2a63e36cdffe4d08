"""`tiedgpt train [DATA...]`: prepares, plans, trains, and shows it."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.program import program
from tiedgpt.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from tiedgpt.train.options import TrainOptions

ABOUT = "Train a GPT on your text. The same command again goes on where the last one stopped."


@dataclass(frozen=True, kw_only=True)
class Arguments(TrainOptions):
    """Train a GPT. The same command again goes on where the last one stopped."""

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Text files, folders, globs, .jsonl, or - for standard input; none: Python's own docs."""
    out: str | None = None
    """The run's directory; default: runs/ and a name from the data and the size."""

    def __post_init__(self) -> None:
        """Leave the checks to `TrainOptions`, whose errors are one line."""


def run(arguments: list[str]) -> int:
    """Train; return the exit code."""
    given = parse(Arguments, "train", arguments, ABOUT)
    options = TrainOptions(
        **{option.name: getattr(given, option.name) for option in fields(TrainOptions)}
    )
    out = Path(given.out) if given.out else default_out(options)

    from tiedgpt.cli.show_training import Display
    from tiedgpt.train.loop import Ended, train
    from tiedgpt.train.plan import record, recorded
    from tiedgpt.train.planning import make_plan, tokenizer_config, training_device
    from tiedgpt.train.prepare import Texts, prepare
    from tiedgpt.train.run_directory import RunDirectory

    directory = RunDirectory(out)
    display = Display(out, command=f"{program()} train {shlex.join(arguments)}".rstrip())
    if options.tokenizer not in ("bpe", "char") and not Path(options.tokenizer).exists():
        display.say(f"tokenizer {options.tokenizer}: looked for on the Hugging Face hub")
    with directory.locked():
        tables = directory.read_record()
        if tables and (differences := options.differences(tables.get("options", {}))):
            raise UserError(
                f"{out} holds a run of other options ({'; '.join(differences)}): give another "
                "--out, or the same options to go on"
            )
        texts = Texts.of(options) if options.data or not tables else None
        digest = texts.digest() if texts and options.data else None
        if tables and digest != tables.get("text", {}).get("sha256"):
            raise UserError(
                f"the text is another than when {out} began: give another --out, or the same text"
            )
        if tables and directory.finished(recorded(tables)[1].steps):
            display.say(f"{out} finished already; generate from it, or train in another --out")
            return EXIT_OK
        with display.encoding() as progress:
            texts = texts or Texts.of(options)
            tokenizer, encoded, notes = prepare(directory, options, texts, progress)
        device = training_device()
        if tables:
            config, plan = recorded(tables)
        else:
            config = tokenizer_config(options, tokenizer)
            display.say("measuring this machine")
            plan = make_plan(options, config, encoded, device)
            directory.write_record(record(options, config, plan, encoded, digest))
        display.plan(options, config, plan, encoded, tokenizer, device, notes)
        with stop_on_signals() as stop, display.training(plan):
            for event in train(
                directory, config, plan, tokenizer, device, stop_requested=stop.requested
            ):
                display.event(event)
                if isinstance(event, Ended):
                    ended = event
        if not ended.finished:
            display.interrupted(ended, plan)
            return EXIT_INTERRUPTED
        display.finished(directory, options, config, ended)
    return EXIT_OK


def default_out(options: TrainOptions) -> Path:
    """Return runs/NAME-SIZE, NAME from the first source of data."""
    first = options.data[0] if options.data else "python-docs"
    path = Path(os.path.abspath(first))
    stem = "stdin" if first == "-" else path.stem
    if not any(c.isalnum() for c in stem) or set(stem) & set("*?["):  # a glob: its folder's name
        stem = next((p.name for p in path.parents if p.name.isprintable() and p.name.isalnum()), "")
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).strip("-.") or "data"
    return Path("runs") / f"{name}-{options.size}"


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
