"""The tokenizer that comes with a checkpoint, whoever wrote it: a path -> Tokenizer.

A directory is searched for transformers' and OpenAI's files (`text/directory.py`), then for those
of each format. A file is recognized by its content; a file of weights stands for its directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tiedgpt.errors import UserError
from tiedgpt.text.directory import read_tokenizer
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.registry import formats, suffixes

Read = Callable[[Path], bytes]
Open = Callable[[Path, Read], OpenFile]


def tokenizer_in_directory(
    directory: Path, read: Read, open_file: Open, *, also_in_weights: bool = True
) -> Tokenizer | None:
    """Return the tokenizer of a directory, transformers' and OpenAI's files first, or None.

    `read` reads a file, `open_file` opens one. Raises `UserError` for a kind that is not supported
    or several tokenizers, `CorruptInputError` for a damaged file.
    """
    if parts := read_tokenizer(directory, read):
        return Tokenizer(*parts, str(directory))
    for format in formats():
        record = format.tokenizer
        if record is None or (record.is_in_weights and not also_in_weights):
            continue
        paths = [path for path in sorted(directory.glob(record.pattern)) if path.is_file()]
        files = [file for file in (open_file(path, read) for path in paths) if record.detect(file)]
        if len(files) > 1:
            names = ", ".join(file.path.name for file in files[:6])
            raise UserError(f"{directory} holds {len(files)} tokenizers ({names})", hint="name one")
        if files:
            return record.read(files[0])
    return None


def tokenizer_in_file(path: Path, read: Read, open_file: Open) -> Tokenizer | None:
    """Return the tokenizer that a file is or holds; for a file of weights, its directory's."""
    if not path.is_file():  # a pipe would be waited for
        return None
    file = open_file(path, read)
    for format in formats():
        if format.tokenizer is not None and format.tokenizer.detect(file):
            return format.tokenizer.read(file)
    is_weights = path.name.endswith(suffixes())
    if is_weights or any(format.detect(file) for format in formats()):
        return tokenizer_in_directory(path.parent, read, open_file, also_in_weights=False)
    parts = read_tokenizer(path, read)
    return Tokenizer(*parts, str(path)) if parts else None
