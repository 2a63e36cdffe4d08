"""`tiedgpt data show|prepare|verify`: show trained tokens; encode texts of any size."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from tiedgpt.cli.console import bar, console, fact, note
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import UserError
from tiedgpt.files import format_bytes, format_count, list_some
from tiedgpt.options import argument, option
from tiedgpt.runtime import count_cores
from tiedgpt.train.plan.groups import DataOptions, FileOptions

if TYPE_CHECKING:
    from tiedgpt.data import EncodedCorpus, Example, ExampleReader
    from tiedgpt.text import Tokenizer

ABOUT = """Look at examples, and prepare texts of any size.

  tiedgpt data show DATA ...            which tokens of examples are trained
  tiedgpt data prepare DATA ... -o DIR  encode texts, by all cores or a cluster
  tiedgpt data verify DIR               check every file of prepared texts

  tiedgpt data VERB --help

lists the options of each."""
ABOUT_SHOW = """Show which tokens of examples would be trained.

A line of a .jsonl file is {"text": ...}, {"prompt": ..., "completion": ...} or {"messages":
[{"role": ..., "content": ...}, ...]}. Trained tokens are green; without colour, they are in braces
with plus signs. `tiedgpt tune` trains on such files."""
ABOUT_PREPARE = """Encode texts of any size as token shards, which `tiedgpt train DIR` trains on.

The bytes are the same for any number of processes. After a kill the same command continues with
the parts that are missing; files that have changed since are refused."""
ABOUT_VERIFY = """Read every file of prepared texts, and compare it with the manifest.

The exit code is 6 if a file is missing or has changed."""
UNTRAINED, TRAINED = ("dim", ""), ("green", "bold green")
"""Styles of untrained and trained tokens; two alternate, to show where tokens end."""

EDGE = 150
"""Tokens shown at the beginning and at the end of an example that is longer than both."""
LOG_SECONDS = 60
"""Seconds between two lines of progress in a log."""
STAGES = {
    "tokenizer": "reading text for the tokenizer",
    "merging": "merging pairs for the tokenizer",
    "encoding": "encoding",
    "verifying": "verifying",
}
"""Descriptions of the stages of `prepare_data` and `verify_data`."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The verbs of `data`."""

    verb: Literal["show", "prepare", "verify"] = argument("What to do.")


@dataclass(frozen=True, kw_only=True)
class ShowArguments(FileOptions):
    """Options of `data show`."""

    data: tuple[str, ...] = argument("Files of examples: .jsonl, or text files.")
    tokenizer: str | None = option(
        None,
        "The tokenizer's path or hub name; default: that of the newest run in runs/.",
        metavar="TOKENIZER",
    )
    template: Literal["chatml", "plain"] | None = option(
        None, "Chat template; default: the one in the tokenizer's directory, or chatml."
    )
    context: int | None = option(
        None, "Maximum number of tokens in an example; default: no limit.", least=2
    )
    too_long: Literal["drop", "cut", "error"] = option("drop", "What to do with longer examples.")
    skip_bad: bool = option(False, "Skip and count lines that are not valid examples.")
    examples: int = option(
        3,
        "Number of examples to print; the middle of long ones is left out. All are counted.",
        least=0,
    )
    format: Literal["human", "json"] = option("human", "json: one object.", short="f")


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(DataOptions):
    """Options of `data prepare`."""

    data: tuple[str, ...] = argument(
        "Files of text, .jsonl, .csv, .tsv or .parquet, also compressed; folders, globs, or "
        "hf:OWNER/NAME[:SPLIT] of the hub."
    )
    out: str = option(MISSING, "Directory to write or to complete.", metavar="DIR", short="o")
    tokenizer: str = option(
        "bpe",
        "bpe: trained on the data; char: the data's characters; or a directory, file or hub name.",
        metavar="TOKENIZER",
    )
    vocab_size: int | None = option(
        None, "Size of the vocabulary to train; default: 8,192.", metavar="N", least=1
    )
    workers: int | None = option(
        None, "Number of processes; default: one for each core.", "processes", least=1
    )
    part: str | None = option(
        None,
        "Encode only the I-th of N parts, as a task of a Slurm array; the last task to end "
        "completes the directory.",
        "processes",
        metavar="I/N",
    )
    ray: str | None = option(
        None,
        "Encode on a Ray cluster that sees the files: its address, auto, or local to start one.",
        "processes",
        metavar="ADDRESS",
    )
    format: Literal["human", "json"] = option("human", "json: one object.", short="f")

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise UserError("is for --tokenizer bpe, which is trained", option="vocab_size")
        if self.workers is not None and self.ray is not None:
            raise UserError("exclude each other", option=("workers", "ray"))
        self.task  # noqa: B018

    @property
    def task(self) -> tuple[int, int]:
        """The number of the task, from 1, and how many there are."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part or "1/1")
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"must be I/N with I from 1 to N, got {self.part}",
                hint="as --part $SLURM_ARRAY_TASK_ID/16 with `sbatch -a 1-16`",
                option="part",
            )
        return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Options of `data verify`."""

    directory: str = argument("Output of `tiedgpt data prepare`.", metavar="DIR")


PARTS = {"show": ShowArguments, "prepare": PrepareArguments, "verify": VerifyArguments}
"""The options of each verb."""


def run(arguments: list[str]) -> None:
    """Run one of the verbs."""
    verbs = {"show": show, "prepare": prepare, "verify": verify}
    if arguments and arguments[0] in verbs:
        verbs[arguments[0]](arguments[1:])
    else:
        parse(Arguments, "data", arguments, ABOUT)


def prepare(arguments: list[str]) -> None:
    """Encode texts into a directory."""
    args = parse(PrepareArguments, "data prepare", arguments, ABOUT_PREPARE)
    note(f"preparing {list_some(args.data)} in {args.out}")
    from tiedgpt.data import plan_preparation, prepare_data
    from tiedgpt.data.encode import note_split_characters
    from tiedgpt.data.prepare import TOKENIZER, VOCAB_SIZE
    from tiedgpt.text import Tokenizer

    plan = plan_preparation(args.data, val=args.val, **args.reading)
    with _progress() as progress:
        encoded = prepare_data(
            plan,
            args.out,
            args.tokenizer
            if args.tokenizer in ("bpe", "char")
            else Tokenizer.from_pretrained(args.tokenizer),
            vocab_size=args.vocab_size or VOCAB_SIZE,
            workers=args.workers or count_cores(),
            ray=args.ray,
            task=args.task,
            progress=progress,
        )
    if encoded is not None:
        note(*encoded.notes)
        if args.tokenizer == "bpe":
            trained = Tokenizer.from_pretrained(Path(args.out) / TOKENIZER)
            note(*note_split_characters(encoded, trained))
    if args.format == "json":
        facts: dict[str, Any] = {"directory": args.out, "complete": encoded is not None}
        if encoded is not None:
            facts |= {"train": asdict(encoded.train), "val": asdict(encoded.val)}
        print(json.dumps(facts, indent=2))
    elif encoded is None:
        fact("part", f"{args.part} is done, and other parts are not")
    else:
        _show_corpus(encoded)
        fact("next", f"tiedgpt train {args.out}")


def verify(arguments: list[str]) -> None:
    """Check every file of a prepared directory."""
    args = parse(VerifyArguments, "data verify", arguments, ABOUT_VERIFY)
    from tiedgpt.data import verify_data

    with _progress() as progress:
        encoded = verify_data(args.directory, progress)
    _show_corpus(encoded)
    fact("verified", "every file is as it was written")


def _show_corpus(encoded: EncodedCorpus) -> None:
    for name, side in (("train", encoded.train), ("validate", encoded.val)):
        size = f"{format_bytes(side.utf8_bytes)}, {side.tokens:,} tokens"
        fact(name, f"{format_count(side.documents, 'document')}, {size}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show the bytes done, their rate, the elapsed and the remaining time: a bar, or log lines."""
    from rich.progress import (
        DownloadColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    to = console(stderr=True)
    columns = DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    stage, start_time, start_bytes, last_time = "", 0.0, 0, 0.0
    with bar("", *columns, to=to) as move:

        def show(name: str, done: int, total: int) -> None:
            nonlocal stage, start_time, start_bytes, last_time
            move(done, total)
            now = time.monotonic()
            if name != stage:
                stage, start_time, start_bytes, last_time = name, now, done, now
                note(f"{STAGES[name]}: {format_bytes(total)}", to=to)
            elif not to.is_terminal and now - last_time >= LOG_SECONDS:
                last_time = now
                bytes_per_second = max(1.0, (done - start_bytes) / (now - start_time))
                seconds = (total - done) / bytes_per_second
                remaining = f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
                size = f"{format_bytes(done)} of {format_bytes(total)}"
                note(
                    f"{STAGES[name]}: {size}, {format_bytes(bytes_per_second)}/s, {remaining} left"
                )

        yield show


def show(arguments: list[str]) -> None:
    """Show the examples."""
    args = parse(ShowArguments, "data show", arguments, ABOUT_SHOW)
    from tiedgpt.data import TEMPLATES, ExampleReader, documents, read_template
    from tiedgpt.weights.source import open_tokenizer

    corpus = documents(args.data, **args.file_reading)
    source = source_or_newest(args.tokenizer, weights=False)
    tokenizer = open_tokenizer(source)
    stored = partial(read_template, source.path, source.read)
    reader = ExampleReader(
        corpus,
        tokenizer,
        template=TEMPLATES[args.template] if args.template else stored,
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
        facts = {"place": example.location, "ids": example.ids}
        rows.append(facts | {"tokens": tokens, "trained": trained})
    remarks = {name: asdict(remark) for name, remark in reader.remarks.items()}
    return {
        "kind": reader.kind,
        **counts,
        "remarks": remarks,
        "unread": dict(reader.unread),
        "special_tokens": dict(reader.special_tokens),
        "shown": rows,
    }


def _print(reader: ExampleReader, counts: dict[str, int], examples: list[Example]) -> None:
    to = console()
    colour = to.color_system is not None and not to.no_color
    for example in examples:
        to.print(Text(example.location, "bold"))
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
        text.append(token, (TRAINED if trained else UNTRAINED)[number % 2])
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
