"""Keras 3's saved weights: `.weights.h5`, its shards, and the `.keras` archive around one.

    model.weights.h5      HDF5; "layers/transformer_decoder_1/_feedforward_layer_norm/vars/0"
    model.weights.json    which of model_00000.weights.h5, ... holds the variables of which layer
    model.keras           a zip, nothing in it compressed: config.json, metadata.json and
                          model.weights.h5, or the sharded files

(keras-team/keras `src/saving/saving_lib.py`.) The tensors of an archive are read where they lie in
it. What an optimizer keeps is left out. The archive's config.json becomes the checkpoint's config,
under "keras"; no class that it names is ever imported.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import beside, read_json
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.hdf5_file import MAGIC, read_datasets
from tiedgpt.weights.tensors import Storage, StoredTensor, plain_reader, printable

FORMAT = "Keras HDF5"
WEIGHTS, SHARDED, CONFIG = "model.weights.h5", "model.weights.json", "config.json"
EMBEDDING = "reversible_embedding/vars/0"
OPTIMIZER = "optimizer/"
ASSETS = "assets/preprocessor/tokenizer"
TOKENIZER = ("vocabulary.json", "merges.txt")
ZIP_MAGIC = b"PK\3\4"
MAX_TEXT = 16 << 20
MAX_SHARDS = 4096


@dataclass(frozen=True)
class _Range:
    """Where an HDF5 file lies: a file of its own, or bytes of an archive."""

    path: Path
    begin: int = 0
    size: int | None = None


def open_keras(path: Path) -> Checkpoint:
    """Open a `.weights.h5`, a `.weights.json` with its shards beside it, or a `.keras` archive.

    Raises `CorruptInputError` for what is damaged, `UserError` for what is not read here.
    """
    with path.open("rb") as file:
        head = file.read(8)
    config: dict[str, Any] = {}
    if head == MAGIC:
        ranges = [_Range(path)]
    elif head[:4] == ZIP_MAGIC:
        ranges, config = _in_archive(path)
    else:
        ranges = [_Range(beside(path, name)) for name in _shards(path, read_json(path))]
    tensors: dict[str, StoredTensor] = {}
    for lies in ranges:
        opened = _tensors(lies)
        if twice := tensors.keys() & opened.keys():
            raise CorruptInputError(f"{path}: two shards hold {printable(min(twice))[:200]}")
        tensors |= opened
    embeddings = tuple(name for name in tensors if name.endswith(EMBEDDING))
    tied = len(embeddings) == 1
    files = dict.fromkeys([path, *(lies.path for lies in ranges)])
    return Checkpoint(
        path, FORMAT, tensors, config, files=tuple(files), reads=embeddings, predicts=embeddings,
        claim=True if tied else None,
        claim_source="Keras's ReversibleEmbedding: one matrix reads and predicts" if tied
        else "the file does not say whether the head is tied",
    )  # fmt: skip


def is_archive(path: Path) -> bool:
    """Whether a zip is Keras's, by the names in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.NameToInfo.keys()
    except Exception:  # a damaged zip; whoever opens it says how
        return False
    return CONFIG in names and not names.isdisjoint((WEIGHTS, SHARDED))


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the vocabulary and the merges in an archive of a task, by their names; {} without.

    Raises `CorruptInputError` and `UserError` as `open_keras`.
    """
    found = {}
    with _archive(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        for name in TOKENIZER:
            if (inside := f"{ASSETS}/{name}") in members:
                found[name] = _content(path, archive, members, inside)
    return found


def _tensors(lies: _Range) -> dict[str, StoredTensor]:
    tensors = {}
    for name, dataset in read_datasets(lies.path, begin=lies.begin, size=lies.size).items():
        if name.startswith(OPTIMIZER):
            continue
        start = lies.begin + dataset.start
        columns = dataset.shape[-1] if dataset.shape else 1
        readable = dataset.item_bytes in (1, 2, 4, 8) and not dataset.dtype.startswith("HDF5")
        tensors[name] = StoredTensor(
            name, dataset.shape, dataset.dtype, dataset.n_bytes,
            Storage(str(lies.path), start, start + dataset.n_bytes),
            plain_reader(lies.path, start, columns, dataset.item_bytes) if readable else None,
        )  # fmt: skip
    return tensors


def _shards(path: Path, index: dict[str, Any]) -> list[str]:
    """Return the names of the files among which an index divides the variables."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInputError(f"{path} has no weight_map")
    names: set[str] = set()
    for layer, shards in weight_map.items():
        listed = shards if isinstance(shards, list) else [shards]
        if not listed or not all(isinstance(name, str) for name in listed):
            raise CorruptInputError(f"{path} names no file for {printable(layer)[:200]}")
        names.update(listed)
    if len(names) > MAX_SHARDS:
        raise CorruptInputError(f"{path} names {len(names):,} files")
    return sorted(names)


def _in_archive(path: Path) -> tuple[list[_Range], dict[str, Any]]:
    with _archive(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        config = _json(path, archive, members, CONFIG)
        names = [WEIGHTS]
        if WEIGHTS not in members:
            names = _shards(path, _json(path, archive, members, SHARDED))
        return [_range(path, members, name) for name in names], {"keras": config}


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except TiedGPTError:
        raise
    except Exception as error:  # BadZipFile, EOFError, struct.error, RuntimeError, ...
        why = str(error) or type(error).__name__
        raise CorruptInputError(f"{path} is no sound .keras archive: {printable(why)}") from None


def _member(path: Path, members: dict[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    info = members.get(name)
    if info is None:
        raise CorruptInputError(f"{path} is no sound .keras archive: it has no {name[:80]!r}")
    if info.compress_type or info.compress_size != info.file_size:
        raise UserError(
            f"{path}: {name!r} in it is compressed, as Keras writes none: unpack it, put its files "
            "into a directory, and give that"
        )
    return info


def _content(
    path: Path, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str
) -> bytes:
    info = _member(path, members, name)
    if info.file_size > MAX_TEXT:
        raise CorruptInputError(f"{path}: its {name} has {info.file_size:,} bytes")
    return archive.read(info)


def _json(
    path: Path, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str
) -> dict[str, Any]:
    raw = _content(path, archive, members, name)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptInputError(f"{path}: its {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptInputError(f"{path}: its {name} holds a JSON {type(value).__name__}")
    return value


def _range(path: Path, members: dict[str, zipfile.ZipInfo], name: str) -> _Range:
    """Return where a member's bytes lie: behind its local header, whose length only it says."""
    info = _member(path, members, name)
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    if len(header) < 30 or not header.startswith(ZIP_MAGIC):
        raise CorruptInputError(f"{path} is no sound .keras archive: {name!r} is not in its place")
    begin = info.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))
    if begin + info.file_size > path.stat().st_size:
        raise CorruptInputError(f"{path} is cut off: {name!r} ends behind it")
    return _Range(path, begin, info.file_size)
