"""The tokenizer that comes with a checkpoint, whoever wrote it: SOURCE -> Tokenizer.

A directory is searched for the files of each project. A file is recognized by its content; a file
of weights stands for its directory. `text/directory.py` reads the files of transformers and OpenAI;
the modules of the formats read the others.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import tokenizers

from tiedgpt.errors import UserError
from tiedgpt.text.directory import EXPECTED, FILE_NAMES, read_tokenizer
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.formats import gguf, llmc, nanogpt
from tiedgpt.weights.formats.nanogpt.data_pickle import BEGINS
from tiedgpt.weights.hub import local_directory

META, TOKENS = "meta.pkl", "gpt2_tokenizer.bin"
_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19")
"""How torch's files begin: as a zip, and before version 1.6 as the pickle of a magic number."""
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".onnx", ".index", ".npy",
)  # fmt: skip


def open_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer of a directory, a file or a hub name, as `Tokenizer.from_pretrained`.

    Raises `UserError` where there is none or it is of a kind that is not supported,
    `CorruptInputError` where a file of it is damaged.
    """
    path = local_directory(source, [*FILE_NAMES, META, TOKENS])
    found = _in_directory(path, with_gguf=True) if path.is_dir() else _in_file(path)
    if found is None:
        raise UserError(
            f"{path} holds no tokenizer{('' if path.is_dir() else ', nor does its directory')}",
            hint=(
                f"expected {EXPECTED}, or nanoGPT's {META} (kept in its data/NAME: copy it "
                f"there), or {TOKENS}; a model of GPT-2's vocabulary takes "
                "Tokenizer.from_pretrained('gpt2')"
            ),
        )
    return found


def tokenizer_for(model: Any, tokenizer: Any, *, needed: bool = False) -> Tokenizer | None:
    """Return the tokenizer given, or the one that lies with a model that is a path.

    `tokenizer` may be ours, a path, or one of transformers or `tokenizers`. None if there is none;
    where it is `needed`, `UserError`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if isinstance(backend, tokenizers.Tokenizer):
        return Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()))
    if isinstance(tokenizer, (str, os.PathLike)):
        return open_tokenizer(os.fspath(tokenizer))
    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        with contextlib.nullcontext() if needed else contextlib.suppress(UserError):
            return open_tokenizer(os.fspath(model))
    if not isinstance(tokenizer, (Tokenizer, type(None))):
        kind = type(tokenizer).__name__
        raise UserError(
            f"must be a tiedgpt.Tokenizer or where one is, got {kind}", option="tokenizer"
        )
    if needed and tokenizer is None:
        raise UserError(
            "a model in memory has no tokenizer", hint="give it, or ids in place of the text"
        )
    return tokenizer


def _in_directory(directory: Path, *, with_gguf: bool = False) -> Tokenizer | None:
    """Return the tokenizer of a directory, transformers' and OpenAI's files first."""
    if found := read_tokenizer(directory):
        return Tokenizer(*found, str(directory))
    if (directory / META).is_file():
        return nanogpt.tokenizer(directory / META)
    binary = sorted(directory.glob("*.bin"))
    llmcs = [file for file in binary if _head(file).startswith(llmc.TOKENIZER_MAGIC)]
    files = llmcs or (sorted(directory.glob("*.gguf")) if with_gguf else [])
    if len(files) > 1:
        kind = "tokenizers of llm.c" if llmcs else "GGUF files"
        raise UserError(f"{directory} holds {len(files)} {kind}", hint="name one")
    return _in_file(files[0]) if files else None


def _in_file(path: Path) -> Tokenizer | None:
    """Return the tokenizer that a file is or holds; for a file of weights, its directory's."""
    head = _head(path)
    if gguf.detect(path, head):
        return gguf.tokenizer(path)
    if head.startswith(llmc.TOKENIZER_MAGIC):
        return llmc.tokenizer(path)
    of_weights = head.startswith((llmc.MAGIC, *_TORCH)) or path.name.endswith(_WEIGHTS)
    if not of_weights and (found := read_tokenizer(path)):
        return Tokenizer(*found, str(path))
    if not of_weights and (path.suffix == ".pkl" or BEGINS.match(head)):
        return nanogpt.tokenizer(path)
    if of_weights or head[8:9] == b"{":  # so begins a safetensors file of any name
        return _in_directory(path.parent)
    return None


def _head(path: Path) -> bytes:
    if not path.is_file():  # a pipe would be waited for
        return b""
    try:
        with path.open("rb") as file:
            return file.read(32)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror})", hint="check the file"
        ) from error
