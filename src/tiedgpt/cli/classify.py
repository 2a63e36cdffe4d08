"""`tiedgpt classify MODEL [TEXT | FILE]`: ask the head that `train --task` trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import show_text
from tiedgpt.cli.options import UsageError, parse
from tiedgpt.cli.source import read_text
from tiedgpt.errors import UserError
from tiedgpt.files import JSON_LINES, read_json_lines, reading
from tiedgpt.options import argument, option

if TYPE_CHECKING:
    from tiedgpt.heads.predictions import Kind

ABOUT = """Label texts with a model of `train --task`: labels, tags, choices or answers, with
probabilities.

INPUT is a text, or a file with a text a line, or .jsonl with an object a line,
as in training but without its label:
  classify  {"text": ...}
  tag       {"tokens": [...]} or {"text": ...}
  choose    {"text": ..., "choices": [...]}
  answer    {"question": ..., "context": ...}"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Label texts."""

    source: str = argument("A run, a model's directory, or a hub name.", metavar="MODEL")
    input: str = argument(
        "A text, a file, or - for standard input; default: standard input.", default="-"
    )
    choices: tuple[str, ...] = option((), "For choose: what may follow the text.")
    question: str | None = option(None, "For answer: what is asked about the text.")
    tokenizer: str | None = option(
        None, "The tokenizer's path or hub name, if it is not with the model.", metavar="TOKENIZER"
    )
    format: Literal["human", "json"] = option("human", "json: one object a line.", short="f")


def run(arguments: list[str]) -> None:
    """Classify."""
    args = parse(Arguments, "classify", arguments, ABOUT)
    from tiedgpt.heads import open_head, predict
    from tiedgpt.heads.predictions import KINDS
    from tiedgpt.weights.tokenizer_files import tokenizer_for

    head = open_head(args.source)
    tokenizer = tokenizer_for(args.source, args.tokenizer, needed=True)
    assert tokenizer is not None
    records = list(_records(args, KINDS[type(head)]))
    if not records:
        raise UserError(f"{args.input} holds no text")
    for record, answer in zip(records, predict(head, tokenizer, records), strict=True):
        if args.format == "json":
            print(json.dumps(record | answer, ensure_ascii=False), flush=True)
        else:
            show_text(_in_words(answer, record))


def _records(args: Arguments, kind: Kind) -> Iterator[dict[str, Any]]:
    """Yield the records of the input."""
    path = Path(args.input)
    shared: dict[str, Any] = {}
    if args.choices:
        shared["choices"] = list(args.choices)
    if args.question is not None:
        shared["question"] = args.question
    is_file = args.input != "-" and len(args.input) < 256 and path.is_file()
    if is_file and path.suffix.lower() in JSON_LINES:
        with reading(path, "file of examples"), path.open("rb") as file:
            for _, record in read_json_lines(file, str(path), kind.fields):
                yield shared | record
        return
    if kind.shared and kind.shared not in shared:
        hint = f"give --{kind.shared}, or .jsonl with a field of that name"
        raise UsageError(f"this model needs {kind.shared}", hint)
    is_text = not is_file and args.input != "-"
    whole = args.input if is_text else read_text(args.input, "INPUT")
    yield from (shared | {kind.text: line} for line in whole.splitlines() if line.strip())


def _in_words(answer: dict[str, Any], record: dict[str, Any]) -> str:
    """Return an answer as a line."""
    if "label" in answer:
        return f"{answer['label']}  {answer['probability']:.2f}  {record['text']}"
    if "spans" in answer:
        text = str(record["text"])
        for span in reversed(answer["spans"]):
            tag = f"[{span['label']} {span['probability']:.2f}]"
            text = text[: span["to"]] + tag + text[span["to"] :]
        return text
    if "labels" in answer:
        pairs = zip(
            record["tokens"], answer["labels"], strict=False
        )  # fewer labels where it is cut
        return " ".join(f"{word}[{label}]" for word, label in pairs)
    if "choice" in answer:
        best = answer["choice"]
        return f"{record['choices'][best]}  {answer['probabilities'][best]:.2f}"
    return f"{answer['text']}  {answer['probability']:.2f}  {answer['from']}-{answer['to']}"
