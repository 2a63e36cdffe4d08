"""A .keras archive: a zip of uncompressed files, so that arrays are read where they are in it."""

from __future__ import annotations

import contextlib
import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.tensors import printable

ZIP_MAGIC = b"PK\3\4"
WEIGHTS, INDEX, CONFIG = "model.weights.h5", "model.weights.json", "config.json"
MAX_TEXT = 16 << 20
"""Bytes of a text file in an archive."""


def is_archive(path: Path) -> bool:
    """Whether a zip is Keras's, by the names in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.NameToInfo.keys()
    except Exception:  # a damaged zip; whoever opens it says how
        return False
    return CONFIG in names and not names.isdisjoint((WEIGHTS, INDEX))


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; whatever zipfile raises within becomes a `CorruptInputError`."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except TiedGPTError:
        raise
    except Exception as error:  # BadZipFile, EOFError, struct.error, RuntimeError, ...
        why = str(error) or type(error).__name__
        raise CorruptInputError(f"{path} is a damaged .keras archive: {printable(why)}") from None


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    info = archive.NameToInfo.get(name)
    if info is None:
        raise CorruptInputError(f"{path} is a damaged .keras archive: it has no {name[:80]!r}")
    if info.compress_type or info.compress_size != info.file_size:
        raise UserError(
            f"{path}: {name!r} in it is compressed, which Keras does not do: unpack it, put its "
            "files into a directory, and give that"
        )
    return info


def read_member(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a small file in an archive."""
    info = _member(path, archive, name)
    if info.file_size > MAX_TEXT:
        raise CorruptInputError(f"{path}: its {name} has {info.file_size:,} bytes")
    return archive.read(info)


def read_json_member(path: Path, archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of an archive."""
    try:
        value = json.loads(read_member(path, archive, name))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TiedGPTError):
            raise
        raise CorruptInputError(f"{path}: its {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptInputError(f"{path}: its {name} holds a JSON {type(value).__name__}")
    return value


def stored_range(path: Path, archive: zipfile.ZipFile, name: str) -> tuple[int, int]:
    """Return where a member's bytes begin, after its local header, and how many there are."""
    info = _member(path, archive, name)
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    if len(header) < 30 or not header.startswith(ZIP_MAGIC):
        raise CorruptInputError(f"{path} is a damaged .keras archive: {name!r} is not in its place")
    begin = info.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))
    if begin + info.file_size > path.stat().st_size:
        raise CorruptInputError(f"{path} is truncated: {name!r} ends behind it")
    return begin, info.file_size
