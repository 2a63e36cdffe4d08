"""`tiedgpt classify MODEL [TEXT | FILE]`: answer texts with a head of `train --task`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from tiedgpt.cli.console import note, show_text
from tiedgpt.cli.options import UsageError, parse
from tiedgpt.cli.source import DeviceOption, names_file, require_model_first, text_or_piped
from tiedgpt.errors import UserError
from tiedgpt.files import split_lines
from tiedgpt.options import argument, option
from tiedgpt.runtime import device_for_inference

ABOUT = """Label texts, choose continuations, or predict numbers, with a model of
`train --task`; print probabilities.

INPUT is a text, or a file with a text a line, or records as in training, but
without their label:
  classify  {"text": ...}
  choose    {"text": ..., "choices": [...]}
  regress   {"text": ...}

With --format json, each object is printed with the answer in it, as
`predicted`, `probability` and `probabilities` (regress: only `predicted`, a
number); its other fields, such as `label`, are kept."""


@dataclass(frozen=True, kw_only=True)
class Arguments(DeviceOption):
    """Arguments of `tiedgpt classify`."""

    source: str = argument("A run, a model's directory, or a hub name.", metavar="MODEL")
    input: str = argument(
        "A text, a file, or - for standard input; default: standard input if something is piped "
        "to it.",
        default="",
    )
    choices: tuple[str, ...] = option((), "For choose: the continuations of the text.")
    tokenizer: str | None = option(
        None, "The tokenizer's path or hub name, if it is not with the model.", metavar="TOKENIZER"
    )
    format: Literal["human", "json"] = option("human", "json: one object a line.", short="f")


def run(arguments: list[str]) -> None:
    """Classify."""
    args = parse(Arguments, "classify", arguments, ABOUT)
    require_model_first("classify", args.source, args.input or None)
    if (text := text_or_piped(args.input or None, "INPUT")) is None:
        hint = "give a text, a file, or - to type lines, after the model"
        raise UserError("there is no text to label", hint=hint)
    args = replace(args, input=text)
    from tiedgpt.heads import open_head, predict
    from tiedgpt.heads.inputs import format_fields
    from tiedgpt.weights.source import Source, tokenizer_for

    source = Source(args.source)
    head = open_head(source)
    head.to(device_for_inference(args.device, head.gpt.config.parameter_count()))
    tokenizer = tokenizer_for(source, args.tokenizer, needed=True)
    assert tokenizer is not None
    fields, needs_choices = format_fields(head.record_fields), "choices" in head.record_fields
    if args.choices and not needs_choices:
        raise UserError(
            f"is for models of --task choose, and {args.source} has labels", option="choices"
        )
    records = list(_records(args, fields, needs_choices=needs_choices))
    if not records:
        raise UserError(f"{args.input} holds no text")
    if args.format == "json":
        _require_free_fields(records)
    for record, answer in zip(records, predict(head, tokenizer, records), strict=True):
        if args.format == "json":
            print(json.dumps(record | answer, ensure_ascii=False, default=str), flush=True)
        else:
            show_text(head.describe(record, answer))


def _require_free_fields(records: list[dict[str, Any]]) -> None:
    """Raise `UserError` if a record has a field of the answer, which would overwrite it."""
    from tiedgpt.heads.predictions import ANSWER_FIELDS

    for number, record in enumerate(records, start=1):
        for name in ANSWER_FIELDS:
            if name in record:
                raise UserError(
                    f"record {number} has the field {name!r}, which the answer needs",
                    hint=f"rename it, or leave it out: {', '.join(ANSWER_FIELDS)} are the answer's",
                )


def _records(args: Arguments, fields: str, *, needs_choices: bool) -> Iterator[dict[str, Any]]:
    """Yield the records of the input."""
    from tiedgpt.data import documents
    from tiedgpt.data.readers import has_records

    shared = {"choices": list(args.choices)} if args.choices else {}
    is_file = args.input == "-" or names_file(args.input)
    if is_file and has_records(args.input):
        records = documents([args.input]).records(fields)
        yield from (shared | record for _, record in records)
        return
    if needs_choices and not shared:
        raise UsageError("this model needs choices", "give --choices, or .jsonl with `choices`")
    texts = [args.input]
    if is_file:
        corpus = documents([args.input], keep_end_of_text=True)
        texts = [document.text for document in corpus]
        note(*corpus.remarks.notes())
    lines = (line for text in texts for line in split_lines(text))
    yield from (shared | {"text": line} for line in lines if line.strip())
