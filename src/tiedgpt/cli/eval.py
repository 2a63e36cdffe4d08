"""`tiedgpt eval MODEL DATA`: how well a model predicts a text, or answers questions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tiedgpt.cli.console import bar, note, table
from tiedgpt.cli.options import UsageError, parse
from tiedgpt.cli.source import (
    EngineOptions,
    describe_source,
    require_model_first,
    source_or_newest,
    text_or_piped,
)
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.files import format_count, replacing
from tiedgpt.options import argument, option
from tiedgpt.runtime import count_cores
from tiedgpt.train.plan.groups import FileOptions
from tiedgpt.train.store.directory import RunDirectory

if TYPE_CHECKING:
    from tiedgpt.data.corpus import FileCorpus
    from tiedgpt.evaluate.answers import AnswerScore
    from tiedgpt.evaluate.examples import ExampleScore, ExamplesScore
    from tiedgpt.evaluate.texts import TextScore, WindowScore
    from tiedgpt.infer import Engine
    from tiedgpt.weights.source import Source

ABOUT = """Measure how well a model predicts a text, or how often its answers are right.

DATA is text, as for `tiedgpt train`: a file, a folder, a glob, or - for standard input. Each
document is scored on its own. Or DATA holds records (.jsonl, .csv, .tsv, .parquet): one text
each ("text"), one multiple choice ("context", "choices", "answer": its index), or one cloze
("context", "completion"). A model of `train --task` is measured on labelled records, such as those
that it was trained on.
With --tasks, tasks of lm-evaluation-harness are run instead (pip install 'tiedgpt[eval]')."""


@dataclass(frozen=True, kw_only=True)
class Arguments(EngineOptions, FileOptions):
    """Measure how well a model predicts."""

    source: str = argument("A run, a model's directory or file, or a hub name.", metavar="MODEL")
    data: str | None = argument(
        "Text: a file, a folder, a glob, - for standard input; or a file of records. Default: "
        "standard input if something is piped to it.",
        default=None,
    )
    keep_end_of_text: bool = option(
        False, "Take <|endoftext|> in text files for text; by itself it separates documents."
    )
    tasks: tuple[str, ...] = option((), "Run these tasks of lm-evaluation-harness.")
    context: int | None = option(None, "Tokens per window of a text; default: the model's context.")
    stride: int | None = option(
        None,
        "Tokens from the start of one window to the start of the next; default: half a "
        "context. Each token is scored once, in its first window.",
    )
    bos: bool = option(
        False,
        "Put the beginning-of-text token before each text, so that the first token is scored, "
        "too. A tokenizer with add_bos_token does so anyway.",
    )
    limit: int | None = option(
        None, "Use only this many records of a file, or of each task.", least=1
    )
    save: Path | None = option(
        None, "Save the score of each window or example in this new file, as JSON lines."
    )
    format: Literal["human", "json"] = option(
        "human", "json: one object with all numbers.", short="f"
    )


HEAD_OPTIONS = tuple("source data encoding quoting tokenizer threads limit save format".split())
"""The options that apply to a head, too."""
S = TypeVar("S", "AnswerScore", "ExampleScore", "WindowScore")


def run(arguments: list[str]) -> None:
    """Measure."""
    args = parse(Arguments, "eval", arguments, ABOUT)
    require_model_first("eval", args.source, args.data)
    if not args.tasks:
        args = replace(args, data=text_or_piped(args.data, "DATA"))
    if (args.data is None) == (not args.tasks):
        right = f"tiedgpt eval {shlex.quote(args.source)} DATA"
        raise UsageError("`tiedgpt eval` needs DATA or --tasks", f"give one of them: {right}")
    if args.save is not None and args.save.exists():
        raise UserError(f"--save {args.save} exists", hint="name another file, or delete it")
    _evaluate(args)


def _evaluate(args: Arguments) -> None:
    from tiedgpt.data import documents
    from tiedgpt.data.readers import has_records
    from tiedgpt.evaluate import examples, texts
    from tiedgpt.weights.wrappers import OTHER_HEADS

    source = source_or_newest(args.source)
    if args.data is not None and any(n.startswith(OTHER_HEADS) for n in source.checkpoint.tensors):
        return _evaluate_head(
            args, source, documents([args.data], **args.file_reading, only_records=True)
        )
    data: list[Any] = []
    if args.data is not None and has_records(args.data):
        corpus = documents([args.data], **args.file_reading)
        data = examples.read_examples(corpus)[: args.limit]
        note(*corpus.remarks.notes())
    elif args.data is not None:
        if args.limit is not None:
            raise UserError(f"--limit is for files of records and --tasks, not for {args.data}")
        corpus = documents([args.data], **args.file_reading, keep_end_of_text=args.keep_end_of_text)
        data = [document.text for document in corpus]
        note(*corpus.remarks.notes())
        _note_training_data(args)
    with args.engine(source) as engine:
        if not data:
            return _harness(engine, args)
        result: ExamplesScore | TextScore
        if isinstance(data[0], examples.ChoiceExample):
            if args.context or args.stride or args.bos:
                raise UserError("--context, --stride and --bos are for texts")
            scores = _score_all(args, data, examples.score_examples(engine, data), len(data))
            result = examples.ExamplesScore(scores)
            rows = _describe_examples(result)
        else:
            windows = texts.Windows.of(engine, args.context, args.stride, args.bos)
            args = replace(args, context=windows.context, stride=windows.stride)
            parts = _score_all(args, data, texts.score_windows(engine, data, windows))
            result = texts.TextScore(windows, parts)
            rows = _describe_texts(result)
    _show(args, result.to_json(), rows)


def _show(args: Arguments, numbers: dict[str, Any], rows: dict[str, str]) -> None:
    """Print the numbers as JSON, or the rows."""
    if args.format == "json":
        print(json.dumps(numbers))
    else:
        width = max(map(len, rows))
        for name, value in rows.items():
            print(f"{name:<{width}}  {value}")


def _evaluate_head(args: Arguments, source: Source, corpus: FileCorpus) -> None:
    """Measure the answers of a head on labelled lines."""
    from tiedgpt.evaluate import answers
    from tiedgpt.heads import open_head
    from tiedgpt.infer.torch_session import torch_threads
    from tiedgpt.weights.source import tokenizer_for

    for option_field in fields(Arguments):
        name = option_field.name
        is_given = getattr(args, name) != option_field.default
        if name not in HEAD_OPTIONS and is_given:
            raise UserError(f"is for language models, and {args.source} is a head", option=name)
    head = open_head(source)
    tokenizer = tokenizer_for(source, args.tokenizer, needed=True)
    assert tokenizer is not None
    lines = answers.read_lines(corpus, head)[: args.limit]
    note(*corpus.remarks.notes())
    _note_training_data(args)
    with torch_threads(args.threads or count_cores()):
        scored = _score_all(args, lines, answers.score_lines(head, tokenizer, lines), len(lines))
    result = answers.summarize(head, scored)
    numbers = result.to_json()
    size = format_count(numbers["examples"], "example")
    if numbers["texts_cut"]:
        size += f"; {numbers['texts_cut']} texts cut to the context"
    rows = {"measured on": size}
    if isinstance(result, answers.NumbersScore):
        errors = {
            "squared error": result.to_json()["loss"],
            "absolute error": result.absolute_error,
        }
        _show(args, numbers, {name: f"{error:.4f}" for name, error in errors.items()} | rows)
        return
    low, high = result.interval
    label, share = result.commonest
    rows = {
        "accuracy": f"{result.accuracy:.2%}  (95 %: {low:.2%} to {high:.2%})",
        f"always {label}": f"{share:.2%}",
        "loss": f"{numbers['loss']:.4f} nats",
    } | rows
    _show(args, numbers, rows)
    if args.format == "human":
        print()
        table(
            ("label", ">examples", ">recall", ">predicted", ">precision"),
            [
                (
                    x.label,
                    f"{x.examples:,}",
                    _share(x.right, x.examples),
                    f"{x.predicted:,}",
                    _share(x.right, x.predicted),
                )
                for x in result.by_label()
            ],
        )


def _share(n: int, total: int) -> str:
    return f"{n / total:.1%}" if total else "-"


def _note_training_data(args: Arguments) -> None:
    """Note that the source is a run that was trained on this file or folder."""
    options: dict[str, Any] = {}
    with contextlib.suppress(TiedGPTError):  # a damaged record is no reason to stop
        options = RunDirectory(Path(args.source)).read_record().get("options", {})
    names = (Path(name).resolve() for name in options.get("data", ()))
    if Path(str(args.data)).resolve() in names:
        note(f"{args.source} was trained on {args.data}: its score on new text will be worse")


def _score_all(
    args: Arguments, data: list[Any], scores: Iterator[S], total: int | None = None
) -> list[S]:
    """Return all scores; with --save, write them to a file after the conditions."""
    results: list[S] = []
    with bar("scoring") as progress:
        for score in scores:
            results.append(score)
            progress(len(results), total)
    if args.save is not None:
        conditions = describe_source(args, args.source) | {
            "data": hashlib.sha256(repr(data).encode()).hexdigest(),
            "context": args.context,
            "stride": args.stride,
            "bos": args.bos,
        }
        lines = [json.dumps(line) for line in (conditions, *(asdict(score) for score in results))]
        with replacing(args.save) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return results


def _describe_texts(result: TextScore) -> dict[str, str]:
    windows, (low, high), n = result.windows, result.interval, len(result.scores)
    beginning = "after a beginning-of-text token" if windows.bos else "is not scored"
    first = f"the text's first token {beginning}"
    ranges = (
        f"  (95 %: {math.exp(low):.4f} to {math.exp(high):.4f})",
        f"  ({low:.4f} to {high:.4f})",
    )
    if math.isnan(low):
        ranges = "", ""
    return {
        "perplexity": f"{result.perplexity:.4f}{ranges[0]}",
        "nats a token": f"{result.nats:.4f}{ranges[1]}",
        "bits per byte": f"{result.bits_per_byte:.4f}",
        "measured on": f"{result.tokens:,} tokens in {format_count(n, 'window')}",
        "interval": f"{'none: ' if math.isnan(low) else ''}{result.groups.basis}",
        "windows": f"context {windows.context}, stride {windows.stride}, {first}",
    }


def _describe_examples(result: ExamplesScore) -> dict[str, str]:
    numbers = result.to_json()

    def share(name: str) -> str:
        low, high = numbers[f"{name}_interval"]
        return f"{numbers[name]:.2%}  (95 %: {low:.2%} to {high:.2%})"

    rows = {"accuracy": share("accuracy")}
    if result.is_cloze:
        rows["right is"] = "the text of greedy decoding"
    else:
        rows["by length"] = f"{share('accuracy_by_length')}, logprob per character"
        rows["by chance"] = f"{numbers['chance']:.2%}"
    rows["answers"] = f"{numbers['answer_nats']:.4f} nats each"
    size = format_count(numbers["examples"], "example")
    if numbers["contexts_cut"]:
        size += f"; {numbers['contexts_cut']} contexts cut on the left"
    return rows | {"measured on": size}


def _harness(engine: Engine, args: Arguments) -> None:
    """Run tasks of lm-evaluation-harness."""
    from tiedgpt.evaluate.harness import HarnessModel, simple_evaluate

    model = HarnessModel(engine)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            outcome = simple_evaluate(model, tasks=list(args.tasks), limit=args.limit)
    except (KeyError, OSError) as failed:  # no such task, or its data cannot be had
        raise UserError(f"--tasks {' '.join(args.tasks)}: {failed.args[0]}") from failed
    results: dict[str, dict[str, Any]] = outcome["results"]
    if args.format == "json":
        print(json.dumps(results, default=str))
    else:
        for task, values in results.items():
            print(task)
            for name, value in values.items():
                if isinstance(value, float) and "stderr" not in name:
                    metric, _, filter_name = name.partition(",")
                    error = values.get(f"{metric}_stderr,{filter_name}")
                    spread = f" +- {error:.4f}" if isinstance(error, float) else ""
                    print(f"  {metric:<16} {value:.4f}{spread}")
