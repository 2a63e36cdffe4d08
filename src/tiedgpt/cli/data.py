"""`tiedgpt data show DATA`: what of a file of examples is trained, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from tiedgpt.cli.console import console, fact, note
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.options import argument, option

if TYPE_CHECKING:
    from tiedgpt.data import Example, ExampleReader
    from tiedgpt.text import Tokenizer

ABOUT = """Show which tokens of examples would be trained.

A line of a .jsonl file is {"text": ...}, {"prompt": ..., "completion": ...} or {"messages":
[{"role": ..., "content": ...}, ...]}. Trained tokens are green; without colour, they are in braces
with plus signs. `tiedgpt tune` trains on such files."""
STYLES = {False: ("dim", ""), True: ("green", "bold green")}
"""By whether a token is trained; two in turn, so that one sees where tokens end."""

EDGE = 150
"""Tokens shown at the beginning and at the end of an example that is longer than both."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of `data`."""

    verb: Literal["show"] = argument("What to do.")
    data: tuple[str, ...] = argument("Files of examples: .jsonl, or text files.")
    tokenizer: str | None = option(
        None,
        "The tokenizer's path or hub name; default: that of the newest run in runs/.",
        metavar="TOKENIZER",
    )
    template: Literal["chatml", "plain"] | None = option(
        None, "Chat template; default: the one in the tokenizer's directory, or chatml."
    )
    context: int | None = option(None, "Maximum number of tokens in an example; default: no limit.")
    too_long: Literal["drop", "cut", "error"] = option("drop", "What to do with longer examples.")
    skip_bad: bool = option(False, "Skip and count lines that are not valid examples.")
    examples: int = option(
        3, "Number of examples to print; the middle of long ones is left out. All are counted."
    )
    format: Literal["human", "json"] = option("human", "json: one object.", short="f")


def run(arguments: list[str]) -> None:
    """Show the examples."""
    args = parse(Arguments, "data", arguments, ABOUT)
    from tiedgpt.data import TEMPLATES, ExampleReader, documents
    from tiedgpt.text import Tokenizer
    from tiedgpt.weights.sources import local_directory

    corpus = documents(args.data)
    source = source_or_newest(args.tokenizer)
    tokenizer = Tokenizer.from_pretrained(source)
    path = local_directory(source)
    reader = ExampleReader(
        corpus,
        tokenizer,
        template=TEMPLATES[args.template] if args.template else path,
        context=args.context,
        too_long=args.too_long,
        skip_bad=args.skip_bad,
    )
    examples: list[Example] = []
    counts = {"examples": 0, "tokens": 0, "trained": 0, "longest": 0}
    for example in reader:
        if len(examples) < args.examples:
            examples.append(example)
        counts["examples"] += 1
        counts["tokens"] += len(example.ids)
        counts["trained"] += sum(example.counted[1:])
        counts["longest"] = max(counts["longest"], len(example.ids))
    if args.format == "json":
        print(json.dumps(_as_dict(reader, counts, examples), indent=2))
    else:
        _print(reader, counts, examples)


def _as_dict(
    reader: ExampleReader, counts: dict[str, int], examples: list[Example]
) -> dict[str, Any]:
    rows = []
    for example in examples:
        tokens, trained = zip(*_tokens(example, reader.tokenizer), strict=True)
        each = {"place": example.place, "ids": example.ids, "tokens": tokens, "trained": trained}
        rows.append(each)
    remarks = {name: asdict(remark) for name, remark in reader.remarks.items()}
    return {"kind": reader.kind, **counts, "remarks": remarks, "shown": rows}


def _print(reader: ExampleReader, counts: dict[str, int], examples: list[Example]) -> None:
    to = console()
    colour = to.color_system is not None and not to.no_color
    for example in examples:
        to.print(Text(example.place, "bold"))
        to.print(_marked(example, reader.tokenizer, colour=colour))
    by = f", by the template {reader.template.name}" if reader.kind == "messages" else ""
    share = f"{counts['trained']:,} ({counts['trained'] / counts['tokens']:.0%})"
    fact("kind", reader.kind + by)
    fact("examples", f"{counts['examples']:,}, the longest of {counts['longest']:,} tokens")
    fact("tokens", f"{counts['tokens']:,}, of which {share} are trained")
    if not colour:
        fact("marks", "{+these tokens are trained+}")
    note(*reader.notes())


def _marked(example: Example, tokenizer: Tokenizer, *, colour: bool) -> Text:
    """Return an example's text, its trained tokens in colour or between marks."""
    text, before, tokens = Text(), False, list(_tokens(example, tokenizer))
    if (n_left_out := len(tokens) - 2 * EDGE) > 0:
        tokens[EDGE:-EDGE] = [(f"\n[... {n_left_out:,} tokens ...]\n", False)]
    for number, (token, trained) in enumerate([*tokens, ("", False)]):
        if trained != before and not colour:
            text.append("{+" if trained else "+}")
        text.append(token, STYLES[trained][number % 2])
        before = trained
    return text.append("\n")


def _tokens(example: Example, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the printable text of each token, and whether it is trained.

    A character of several tokens is shown with its last one.
    """
    stream = tokenizer.stream()
    for id, trained in zip(example.ids, [False, *example.counted[1:]], strict=True):
        letters = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in stream.push(id))
        yield "".join(letters), trained
