"""`tiedgpt export MODEL PAGE`: write a model as one HTML file that computes in a browser."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import fact, waiting
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import (
    ModelOptions,
    chat_template,
    model_name,
    read_passage,
    source_or_newest,
)
from tiedgpt.errors import UserError
from tiedgpt.files import format_bytes, replacing
from tiedgpt.options import argument, option

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text import Tokenizer
    from tiedgpt.weights.source import Source

ABOUT = """Write a GPT as one HTML file that computes in a browser.

It holds the page, the tokenizer and the weights. It opens from a disk, needs no server and sends
nothing: type, and see how the model reads and predicts.

  tiedgpt export runs/my-1 page.html"""
OPENING = "The matrix that reads a token is the matrix that predicts a token."
"""Opening text for models without held-out text."""


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions):
    """Options of export."""

    source: str = argument("A run, a model's directory or file, or a hub name.", metavar="MODEL")
    page: Path = argument("The file to write, such as page.html.")
    text: str | None = option(
        None,
        "The text that the page opens with; - reads standard input. Default: a sentence of the "
        "run's held-out text.",
    )
    ids: tuple[int, ...] = option((), "Token ids instead of the text, such as --ids 464 3280 318.")
    precision: Literal["auto", "fp32", "fp16", "int8"] = option(
        "auto",
        "Precision of the matrices in the file: int8 has a scale for each row. auto: fp32 up to "
        "500,000 parameters, int8 above.",
    )
    max_size: float = option(50, "The largest file to write, in MB.", metavar="MB", above=0)


def run(arguments: list[str]) -> None:
    """Export."""
    args = parse(Arguments, "export", arguments, ABOUT)
    if args.page.is_dir() or args.page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{args.page} must be named as a page", hint="end it in .html")
    if args.text is not None and args.ids:
        raise UserError("--text and --ids exclude each other")
    from tiedgpt.core.model import GPT
    from tiedgpt.serve.export import export
    from tiedgpt.weights.source import tokenizer_for

    source = source_or_newest(args.source, task="lm")
    with waiting(f"reading {source}"):
        model = GPT.from_pretrained(source, **args.loading)
        tokenizer = tokenizer_for(source, args.tokenizer_source, needed=args.text is not None)
    text: Any = list(args.ids) or args.text
    if text is None:
        text = _opening(model, tokenizer, source)
    elif isinstance(text, str):
        text = read_passage(text, "--text")
    with waiting("packing the model"):
        page = export(
            model, tokenizer, text, name=model_name(source), source=source,
            template=chat_template(args.tokenizer_source or source), precision=args.precision,
            max_bytes=int(args.max_size * 1e6),
        )  # fmt: skip
    with replacing(args.page) as temporary:
        temporary.write_text(page, encoding="utf-8")
    fact("written", f"{args.page} ({format_bytes(len(page.encode()))}): open it in a browser")


def _opening(model: GPT, tokenizer: Tokenizer | None, source: Source) -> str | list[int]:
    """Return the default opening text, cut to the model's context."""
    from tiedgpt.serve.page_data import opening_text

    text: Any = opening_text(source, tokenizer)
    context = model.config.n_positions
    if tokenizer is None:
        return text[:context] if text else [0]
    with suppress(UserError):  # a character vocabulary may lack some
        text = text or OPENING
        ids = tokenizer.encode(text)
        return str(text) if len(ids) <= context else tokenizer.decode(ids[: context // 2])
    return [0]
