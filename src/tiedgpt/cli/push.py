"""`tiedgpt push MODEL OWNER/NAME`: send a model to the Hugging Face hub."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from tiedgpt.cli.console import fact
from tiedgpt.cli.convert import list_gguf_precisions, ollama_options
from tiedgpt.cli.options import parse
from tiedgpt.files import format_bytes
from tiedgpt.options import argument, option
from tiedgpt.weights.hub import MESSAGE

if TYPE_CHECKING:
    from tiedgpt.weights.source import Source

ABOUT = """Send a model to a repository of the Hugging Face hub: its weights, tokenizer and card.

A new repository is private. Run `hf auth login` or set HF_TOKEN first."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Send a model to the hub."""

    source: str = argument("A run, or a model's directory.", metavar="MODEL")
    repo: str = argument("The repository: OWNER/NAME.")
    public: bool = option(False, "Make a new repository public.")
    gguf: str | None = option(
        None,
        "Also send a file for llama.cpp in this precision, and a Modelfile for Ollama.",
        choices=list_gguf_precisions,
    )
    message: str = option(MESSAGE, "The message of the commit.")
    dry_run: bool = option(False, "Show what would be sent, and send nothing.")
    format: Literal["human", "json"] = option("human", "json: one object.", short="f")


def run(arguments: list[str]) -> None:
    """Push."""
    args = parse(Arguments, "push", arguments, ABOUT)
    from tiedgpt.weights.hub import push
    from tiedgpt.weights.source import Source

    source = Source(args.source)
    directory = source.path
    with TemporaryDirectory() as folder:
        if args.gguf is not None:
            _write_gguf(args, source, Path(folder))
            for path in filter(Path.is_file, directory.glob("*")):
                Path(folder, path.name).symlink_to(path.resolve())
            directory = Path(folder)
        sent = push(
            directory,
            args.repo,
            private=not args.public,
            message=args.message,
            dry_run=args.dry_run,
        )
    if args.format == "json":
        print(json.dumps(asdict(sent), indent=2))
        return
    for name, size in sent.files.items():
        fact("would send" if args.dry_run else "sent", f"{name} ({format_bytes(size)})")
    visibility = "private" if sent.private else "public"
    fact("to", sent.url or f"{sent.repo} ({visibility} if it is new); nothing was sent")


def _write_gguf(args: Arguments, source: Source, folder: Path) -> None:
    """Write the GGUF file and its Modelfile."""
    import torch

    from tiedgpt.weights.convert import convert
    from tiedgpt.weights.load import load
    from tiedgpt.weights.source import tokenizer_for

    tokenizer = tokenizer_for(source, None)
    path = folder / f"{args.repo.rpartition('/')[2]}-{args.gguf}.gguf"
    convert(
        load(source, dtype=torch.float32),
        path,
        "gguf",
        tokenizer=tokenizer,
        precision=args.gguf,
        **ollama_options(source, tokenizer),
    )
