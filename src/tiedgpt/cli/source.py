"""Command-line sources: models, texts, templates, and the program's name."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt import infer
from tiedgpt.cli.console import note, note_compilation, waiting
from tiedgpt.cli.options import UsageError
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import suggest_path
from tiedgpt.infer.generation_config import MAX_THREADS
from tiedgpt.options import argument, option

if TYPE_CHECKING:
    from tiedgpt.data.templates import Template
    from tiedgpt.weights.source import Source

TEXTS = (".txt", ".md", ".rst", ".jsonl", ".html", ".csv")
"""Suffixes of text files, which are not models."""


@dataclass(frozen=True, kw_only=True)
class SourceOrNewest:
    """The model that a verb opens; the default is the newest run's."""

    source: str | None = argument(
        "A run, a model's directory or file, or a hub name; default: the newest run in runs/.",
        default=None,
        metavar="MODEL",
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of all verbs that open a model's file."""

    tokenizer: str | None = option(
        None,
        "The tokenizer's path or hub name, if it is not with the model.",
        "model",
        metavar="TOKENIZER",
    )
    n_head: int | None = option(
        None,
        "The number of heads, if the file does not hold it (minGPT, bare weights).",
        "model",
        least=1,
    )
    activation_function: str | None = option(
        None, "gelu_new or gelu, if the file does not hold it (some nanoGPT files).", "model"
    )
    resolve: Literal["untie", "keep-input", "keep-output", "tie"] | None = option(
        None,
        "What to do if the file holds two different matrices, or if its head is missing (tie).",
        "model",
    )

    @cached_property
    def tokenizer_source(self) -> Source | None:
        """The source that --tokenizer names; None without it."""
        from tiedgpt.weights.source import Source

        return None if self.tokenizer is None else Source(self.tokenizer, weights=False)

    @property
    def loading(self) -> dict[str, Any]:
        """The options that are not None, as `GPT.from_pretrained` and `Engine` take them."""
        options = {
            name: getattr(self, name) for name in ("n_head", "activation_function", "resolve")
        }
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """The device of verbs that compute without training."""

    device: str = option(
        "auto",
        "Device to compute on: cpu, cuda, cuda:1, mps; auto: a GPU, if there is one, from 20 "
        "million parameters.",
        "speed",
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions, DeviceOption):
    """Options of the engine that computes."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = option(
        "auto", "auto: the model's own; int8 and int4 are computed on the CPU.", "speed"
    )
    backend: Literal["auto", "torch", "kernels"] = option(
        "auto",
        "Compute with torch or with tiedgpt's CPU kernels; auto: kernels for packed models, "
        "int8 and int4, and on a CPU from 5 million parameters.",
        "speed",
    )
    threads: int | None = option(
        None,
        "Number of CPU threads; default: the cores that this process may use, at most 16.",
        "speed",
        least=1,
        most=MAX_THREADS,
    )

    @contextmanager
    def engine(self, source: str | os.PathLike[str], **options: Any) -> Iterator[infer.Engine]:
        """Open the model's engine, with its notes on stderr."""
        engine = infer.Engine(
            source, self.precision, backend=self.backend, device=self.device, threads=self.threads,
            tokenizer=self.tokenizer_source, **self.loading, **options,
        )  # fmt: skip
        with engine, note_compilation("inference"):
            note(*engine.notes)
            yield engine


def source_or_newest(
    source: str | None, *, task: Literal["lm"] | None = None, weights: bool = True
) -> Source:
    """Return the source given, or the newest run under runs/ that has a model (of the task).

    `weights` is that of `Source`.
    """
    from tiedgpt.weights.source import Source

    if source is None:
        return Source(newest_run("model/config.json", task))
    if source.lower().endswith(TEXTS) and os.path.isfile(source):
        raise UserError(
            f"{source} is text, not a model", hint=f"train on it with tiedgpt train {source}"
        )
    is_folder = os.path.isdir(source) and not Path(source, "config.json").exists()
    runs = Path(source).glob("*/model/config.json") if is_folder else []
    if names := sorted(str(file.parent.parent) for file in runs):
        raise UserError(
            f"{source} is a folder of runs", hint=f"name one of them, such as {names[0]}"
        )
    return Source(source, weights=weights)


def require_model_first(verb: str, source: str, data: str | None) -> None:
    """Raise `UsageError` for a text or its file where the model should be."""
    is_passage = any(map(str.isspace, source)) and not os.path.exists(source)
    is_text = is_passage or source.lower().endswith(TEXTS)
    if is_text and (data is None or os.path.isdir(data)):
        command = f"tiedgpt {verb} {shlex.quote(data) if data else 'MODEL'} {shlex.quote(source)}"
        raise UsageError(f"{source} is text, not a model", f"the model comes first: {command}")


def describe_source(options: EngineOptions, source: str) -> dict[str, Any]:
    """Return the model, its date and its options, which saved results depend on."""
    path = Path(source)
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {
        "model": str(path.resolve()) if path.exists() else source,
        "changed": max((file.stat().st_mtime for file in files if file.exists()), default=0),
        "tokenizer": options.tokenizer,
        "precision": options.precision,
        "device": options.device,
        **options.loading,
    }


def newest_run(holding: str, task: Literal["lm"] | None = None) -> Path:
    """Return the run under runs/ with the newest file `holding`, and note its name."""
    from tiedgpt.train.store.runs import RUNS, can_generate

    runs = [run for run in RUNS.glob("*") if (run / holding).exists()]
    runs = [run for run in runs if task is None or can_generate(run)]
    if not runs:
        what = "no run" if task is None else f"no run of --task {task}"
        raise UserError(f"no MODEL was given and runs/ has {what}", hint="name one, or train first")
    newest = max(runs, key=lambda run: (run / holding).stat().st_mtime)
    note(f"newest run: {newest}")
    return newest


def model_name(source: Source) -> str:
    """Return the model's name for clients and pages: its directory's or the hub's."""
    path = Path(str(source))
    return path.resolve().name if path.exists() else str(source)


def chat_template(source: Source) -> Template | None:
    """Return the chat template beside the tokenizer, or None, with a note, for a foreign one."""
    from tiedgpt.data.templates import read_template

    try:
        return read_template(source.path, source.read)
    except UserError as error:
        note(f"no chat: {error}")
        return None


def read_text(path: str | Path, flag: str) -> str:
    """Return the UTF-8 text of a file, or of standard input for "-"; errors name `flag`.

    A byte order mark is left out, and lines end at newlines.
    """
    origin = "standard input" if path == "-" else str(path)
    if path == "-" and sys.stdin is None:
        raise UserError(f"standard input is closed, and {flag} - reads it", hint="give the text")
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"{flag} {origin} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorruptInputError(f"{flag} {origin} is not UTF-8: {error}") from None


def names_file(text: str) -> bool:
    """Return whether a text is the name of a file.

    Raises `UserError` for a folder, and for a name that no file has: one with the ending of a file,
    or a word with a slash.
    """
    from tiedgpt.data.corpus import NOT_TEXT
    from tiedgpt.data.readers import ending, has_records

    if len(text) >= 256 or "\n" in text or "\0" in text:
        return False
    if os.path.isdir(text):
        raise UserError(f"{text} is a folder", hint="name a file in it")
    is_name = has_records(text) or ending(text) in (*TEXTS, *NOT_TEXT)
    is_name = is_name or (os.sep in text and not any(map(str.isspace, text)))
    if is_name and not os.path.exists(text):
        near = suggest_path(text) or "check the name"
        raise UserError(f"there is no file {text}", hint=f"{near}; a text may be piped instead")
    return os.path.exists(text)


def text_or_piped(text: str | None, flag: str) -> str | None:
    """Return the text, or "-" for None where standard input holds a text.

    The verbs that work on one text share this rule: generate, classify, inspect and eval. A
    terminal is not read. Standard input that is closed, empty or not readable, as in cron or a
    test, holds no text. A long wait is noted.
    """
    if text is not None or sys.stdin is None:
        return text
    try:
        if sys.stdin.isatty():
            return None
        stream: Any = sys.stdin.buffer
        with waiting(f"waiting for standard input; {flag} '' or </dev/null needs none"):
            if hasattr(stream, "peek"):
                return "-" if stream.peek(1) else None
            position, first = stream.tell(), stream.read(1)
            stream.seek(position)
            return "-" if first else None
    except (OSError, ValueError, AttributeError):
        return None


def has_unread_input() -> bool:
    """Whether bytes wait on standard input; none is read. False where the system cannot tell."""
    try:
        import fcntl
        import termios

        size = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, b"\0" * 4)
        return not sys.stdin.isatty() and int.from_bytes(size, sys.byteorder) > 0
    except (ImportError, OSError, ValueError, AttributeError):
        return False


def read_passage(text: str, flag: str) -> str:
    """Return the text given, or for "-" that of standard input without its final newline."""
    if text != "-":
        return text
    return read_text("-", flag).removesuffix("\n").removesuffix("\r")


def program() -> str:
    """Return the command that calls this program from here."""
    called = sys.argv[0]
    if Path(called).stem != "tiedgpt":
        return f"{Path(sys.executable).name} -m tiedgpt"
    return "tiedgpt" if shutil.which("tiedgpt") == called else os.path.relpath(called)
