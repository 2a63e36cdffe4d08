"""`tiedgpt tune DATA`: fine-tunes a model on text or examples; it prepares, plans and trains."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

from tiedgpt.cli.options import parse
from tiedgpt.cli.source import program, source_or_newest
from tiedgpt.cli.train import RunArguments, report_once
from tiedgpt.errors import UserError
from tiedgpt.options import argument, option
from tiedgpt.train.storage import RUNS, tuned_from
from tiedgpt.train.tune_options import TuneOptions

ABOUT = """Fine-tune a GPT on text, or on examples with replies, one per line of .jsonl:
  {"prompt": ..., "completion": ...}     the completion is trained
  {"messages": [{"role": ..., "content": ...}, ...]}
                                         the assistant's messages are trained
In {"text": ...} lines and text files, all tokens are trained.

To resume a stopped run, give the same command again. The result is in model/. With --lora, the
adapter is also in adapter/, in PEFT's format."""


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments, TuneOptions):
    """Fine-tune a GPT. To resume a stopped run, give the same command again."""

    data: tuple[str, ...] = argument(
        "Examples in .jsonl, or text: files, folders, globs, - for standard input."
    )
    from_: str | None = option(
        None,
        "The model to tune: directory, file, hub name or run; default: the newest run.",
        "model",
        metavar="MODEL",
    )
    epochs: float | None = option(
        None,
        "Train for this many passes over the data; default: 3, and with examples at least 300 "
        "steps.",
        "time",
    )
    minutes: float | None = option(
        None, "Train for about this many minutes instead.", "time", short="m"
    )
    context: int | None = option(
        None,
        "Tokens per row, which is filled with examples; default: the model's context.",
        "model",
    )
    batch_size: int | None = option(
        None,
        "Rows per step; default: 8,192 tokens, or fewer for little data.",
        "optimization",
        short="b",
    )
    optimizer: Literal["auto", "muon", "adamw"] = option(
        "auto",
        "Optimizer of the blocks' matrices; auto: adamw. AdamW trains all other parameters.",
        "optimization",
    )
    lr: float | None = option(
        None,
        "Peak learning rate; default: 6.25e-5 x 768 / width, with --lora ten times that, with "
        "fewer than 100 examples four times.",
        "optimization",
    )
    eval_every: int | None = option(
        None, "Steps between evaluations; default: four evaluations per epoch.", "time"
    )
    val: str | None = option(
        None,
        "Validate on this data; default: a tenth of the text, or one in twenty examples.",
        "data",
        metavar="DATA",
    )
    out: str | None = option(
        None,
        "The run's directory; default: runs/NAME-tuned-1, or -2 and so on for other options.",
        "output",
        metavar="PATH",
        short="o",
    )
    HIDDEN: ClassVar = (
        *(
            "start",
            "examples",
            "memorizes",
            "task",
            "size",
            "width",
            "tokenizer",
            "vocab_size",
            "fork",
        ),
        *("window", "bias", "untie_at"),
    )

    def options(self) -> TuneOptions:
        """Return what decides the run, checked."""
        if not self.data:
            raise UserError("DATA is missing", hint="give a .jsonl file of examples, or text")
        given = {field.name: getattr(self, field.name) for field in fields(TuneOptions)}
        options = TuneOptions(**given | {"start": self.from_ or "the newest run"})
        start = None if self.from_ is None else source_or_newest(self.from_)
        if start is None:
            start = tuned_from(options, [Path(self.out)] if self.out else RUNS.glob("*"))
        return replace(options, start=start or source_or_newest(None, task="lm"))


def run(arguments: list[str]) -> int:
    """Fine-tune; return the exit code."""
    with report_once():
        given = parse(Arguments, "tune", arguments, ABOUT)
        options = given.options()
        given.require_processes()
    return given.run(options, f"{program()} tune {shlex.join(arguments)}")
