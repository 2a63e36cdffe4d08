"""`tiedgpt explain [TOPIC] [MODEL]`: lessons about the one matrix, measured on a live model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiedgpt.cli.console import bar, console, note, show_text, waiting
from tiedgpt.cli.options import UsageError, parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import UserError
from tiedgpt.options import argument, option

ABOUT = """Answer a question about GPTs with numbers from a model.

tie: is the head the embedding? head: why it is not a separate parameter. parameters: 124M, 163M and
back. positions: N predictions or one. norms: norms and angles of W's rows. loss: its gradient for
W's rows. body: other heads on the same body. tuning: what fine-tuning the head, freezing and LoRA
change. Without a topic, the questions are listed."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of `explain`."""

    topic: str | None = argument(
        "tie, head, parameters, positions, norms, body, tuning or loss; default: list the "
        "questions.",
        default=None,
    )
    source: str | None = argument(
        "A run, a model's directory or file, or a hub name; default: the newest run in runs/, "
        "or a tiny GPT, trained in seconds.",
        default=None,
        metavar="MODEL",
    )
    text: str | None = option(
        None,
        "The text to read, of which the first 32 tokens are used; default: a typical part of a "
        "run's validation text, otherwise a fixed text.",
    )
    train: bool = option(
        False, "head: also train two tiny GPTs, tied and untied, and compare their losses."
    )
    tokenizer: str | None = option(
        None, "The tokenizer's path or hub name, if it is not with the model.", metavar="TOKENIZER"
    )
    format: Literal["human", "json"] = option(
        "human", "json: one object with all numbers by name.", short="f"
    )


def run(arguments: list[str]) -> None:
    """Print a lesson."""
    args = parse(Arguments, "explain", arguments, ABOUT)
    from tiedgpt.lessons import TOPICS, explain

    if args.topic not in (None, *TOPICS):
        hint = f"choose one of {', '.join(TOPICS)}"
        if args.topic is not None and Path(args.topic).exists():
            topic = args.source if args.source in TOPICS else "tie"
            hint = f"the topic comes first: tiedgpt explain {topic} {shlex.quote(args.topic)}"
        raise UsageError(f"no topic {args.topic!r}", hint)
    source = None
    if args.topic is not None:
        try:
            source = source_or_newest(args.source, task="lm")
        except UserError:
            if args.source is not None:
                raise
            note("runs/ has no model: a tiny one is taken")
    from rich.progress import TimeRemainingColumn

    to, remaining = console(stderr=True), TimeRemainingColumn()
    what = f"measuring {args.topic} on {source or 'a tiny model'}"
    with waiting(what), bar("", remaining, to=to) as move:
        announced = set[str]()

        def show_steps(training: str, done: int, total: int) -> None:
            if training not in announced:
                announced.add(training)
                note(training, to=to)
            move(done, total)

        lesson = explain(
            args.topic,
            source,
            tokenizer=args.tokenizer,
            text=args.text,
            train=args.train,
            progress=show_steps,
        )
    if args.format == "json":
        print(lesson.to_json())
        return
    title, _, answer = str(lesson).partition("\n\n")
    show_text(f"{title}\n", style="bold")
    show_text(answer)
