"""`tiedgpt tune DATA`: fine-tunes a model on text or examples; it prepares, plans and trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tiedgpt.cli.options import parse
from tiedgpt.cli.run_arguments import RunArguments
from tiedgpt.cli.source import source_or_newest
from tiedgpt.cli.train import report_once, show_run
from tiedgpt.train.plan.options import TuneOptions
from tiedgpt.train.store.runs import RUNS, find_tune_start

ABOUT = """Fine-tune a GPT on text, or on examples with replies, one per line of .jsonl:
  {"prompt": ..., "completion": ...}     the completion is trained
  {"messages": [{"role": ..., "content": ...}, ...]}
                                         the assistant's messages are trained
In {"text": ...} lines and text files, all tokens are trained.

To resume a stopped run, give the same command again. The result is in model/. With --lora, the
adapter is also in adapter/, in PEFT's format."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `tiedgpt tune`."""

    options: TuneOptions
    run: RunArguments


def run(arguments: list[str]) -> int:
    """Fine-tune; return the exit code."""
    with report_once():
        args = parse(Arguments, "tune", arguments, ABOUT)
        start = args.options.start
        if start is None:  # a run to resume has its own, and others begin with the newest run
            out = args.run.out
            start = find_tune_start(args.options, [Path(out)] if out else RUNS.glob("*"))
        options = replace(args.options, start=str(source_or_newest(start, task="lm")))
    return show_run(options, args.run, "tune", arguments)
