"""The tokenizer that comes with a checkpoint, whoever wrote it: SOURCE -> Tokenizer.

A directory is searched for transformers' and OpenAI's files (`text/directory.py`), then for those
of each format. A file is recognized by its content; a file of weights stands for its directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json
from tiedgpt.text.directory import EXPECTED, FILE_NAMES, TOKEN_NAMES, read_tokenizer
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.registry import formats, suffixes
from tiedgpt.weights.sources import local_directory


def open_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer of a directory, a file or a hub name, as `Tokenizer.from_pretrained`.

    Raises `UserError` if none exists or it is of a kind that is not supported,
    `CorruptInputError` if a file of it is damaged.
    """
    path = local_directory(source, chain(FILE_NAMES, _hub_names()))
    tokenizer = _in_directory(path) if path.is_dir() else _in_file(path)
    if tokenizer is None:
        raise UserError(
            f"{path} holds no tokenizer{'' if path.is_dir() else ', nor does its directory'}",
            hint=f"expected {EXPECTED}, or {' or '.join(_hub_names())} (nanoGPT keeps its own in "
            "data/NAME: copy it there); a model of GPT-2's vocabulary takes "
            "Tokenizer.from_pretrained('gpt2')",
        )
    return tokenizer


def _hub_names() -> Iterator[str]:
    """Yield the names that formats' tokenizers have on the hub; this imports every format."""
    for format in formats():
        if format.tokenizer is not None and format.tokenizer.hub_name:
            yield format.tokenizer.hub_name


def tokenizer_for(model: Any, tokenizer: Any, *, needed: bool = False) -> Tokenizer | None:
    """Return the tokenizer given, or the tokenizer in the directory of a model path.

    `tokenizer` may be ours, a path, or one of transformers or `tokenizers`. None if none exists;
    if it is `needed`, `UserError`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if isinstance(backend, tokenizers.Tokenizer):
        named: dict[str, Any] = getattr(tokenizer, "special_tokens_map", {})
        tokens = {key: str(named[key]) for key in TOKEN_NAMES if named.get(key)}
        return Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), tokens)
    if isinstance(tokenizer, (str, os.PathLike)):
        return open_tokenizer(os.fspath(tokenizer))
    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        with contextlib.nullcontext() if needed else contextlib.suppress(UserError):
            return open_tokenizer(os.fspath(model))
    if not isinstance(tokenizer, (Tokenizer, type(None))):
        type_name = type(tokenizer).__name__
        raise UserError(
            f"must be a tiedgpt.Tokenizer or where one is, got {type_name}", option="tokenizer"
        )
    if needed and tokenizer is None:
        raise UserError(
            "a model in memory has no tokenizer", hint="give it, or ids in place of the text"
        )
    return tokenizer


def read_end_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids that end a text by generation_config.json: a chat model has several."""
    path = directory / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise CorruptInputError(f"{path}: eos_token_id must be ids, got {value!r}")
    return tuple(ids)


def _in_directory(directory: Path, *, also_in_weights: bool = True) -> Tokenizer | None:
    """Return the tokenizer of a directory, transformers' and OpenAI's files first."""
    if parts := read_tokenizer(directory):
        return Tokenizer(*parts, str(directory))
    for format in formats():
        record = format.tokenizer
        if record is None or (record.is_in_weights and not also_in_weights):
            continue
        paths = [path for path in sorted(directory.glob(record.pattern)) if path.is_file()]
        files = [file for file in map(OpenFile, paths) if record.detect(file)]
        if len(files) > 1:
            names = ", ".join(file.path.name for file in files[:6])
            raise UserError(f"{directory} holds {len(files)} tokenizers ({names})", hint="name one")
        if files:
            return record.read(files[0])
    return None


def _in_file(path: Path) -> Tokenizer | None:
    """Return the tokenizer that a file is or holds; for a file of weights, its directory's."""
    if not path.is_file():  # a pipe would be waited for
        return None
    file = OpenFile(path)
    for format in formats():
        if format.tokenizer is not None and format.tokenizer.detect(file):
            return format.tokenizer.read(file)
    is_weights = path.name.endswith(suffixes())
    if is_weights or any(format.detect(file) for format in formats()):
        return _in_directory(path.parent, also_in_weights=False)
    parts = read_tokenizer(path)
    return Tokenizer(*parts, str(path)) if parts else None
