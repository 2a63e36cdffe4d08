"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

    model.ckpt.index                    a table: the name of a tensor -> its type, shape and place
    model.ckpt.data-00000-of-00001      the tensors' bytes, little-endian, row by row

The messages in the table are those of tensorflow/core/protobuf/tensor_bundle.proto; under the empty
name stands the header. A tensor's checksum is verified when the first of its bytes are asked for:
the whole of it is then read once. `hparams.json`, which OpenAI puts beside, is taken along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.crc32c import crc32c_in_place, masked
from tiedgpt.weights.formats.leveldb_table import read_table
from tiedgpt.weights.formats.protobuf import Span
from tiedgpt.weights.tensors import (
    BLOCK_BYTES,
    Native,
    Read,
    Storage,
    StoredTensor,
    plain_reader,
    printable,
)

SUFFIX = ".index"
HPARAMS = "hparams.json"
TYPES = {
    1: ("float32", 4), 2: ("float64", 8), 3: ("int32", 4), 4: ("uint8", 1), 5: ("int16", 2),
    6: ("int8", 1), 9: ("int64", 8), 10: ("bool", 1), 14: ("bfloat16", 2), 17: ("uint16", 2),
    19: ("float16", 2), 22: ("uint32", 4), 23: ("uint64", 8),
}  # fmt: skip
"""DataType (tensorflow/core/framework/types.proto) -> name, bytes an element."""
STRING = 7
HEADER_SHARDS, HEADER_ENDIANNESS, HEADER_VERSION = 1, 2, 3
VERSION_MIN_CONSUMER = 2
OUR_VERSION = 1
ENTRY_TYPE, ENTRY_SHAPE, ENTRY_SHARD, ENTRY_OFFSET, ENTRY_SIZE, ENTRY_CHECKSUM = 1, 2, 3, 4, 5, 6
ENTRY_SLICES = 7
SHAPE_DIM, SHAPE_UNKNOWN_RANK, DIM_SIZE = 2, 3, 1
MAX_DIMS = 64
SLICE = b"\0"
"""The first byte of the name of a slice; such names stand for pieces of a tensor."""


@dataclass
class _Entry:
    """What the table says of a tensor."""

    type_number: int = 0
    shape: list[int] = field(default_factory=list)
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    sliced: bool = False


def open_bundle(index_path: Path) -> Checkpoint:
    """Read the index of a checkpoint; the tensors' files must lie beside it.

    Raises `CorruptInputError` where something is damaged, missing, or not as long as it must be,
    and `UserError` for what is sound but not read here: big-endian files, tensors in slices.
    """
    table = read_table(index_path)
    if not table or table[0][0] != b"":
        raise CorruptInputError(f"{index_path} is no TensorFlow checkpoint: it has no header")
    try:
        n_shards = _header(table[0][1])
    except ValueError as error:
        raise _same(error, f"{index_path}: its header: {error}") from None
    tensors: dict[str, StoredTensor] = {}
    shards: dict[Path, int] = {}
    sliced = False
    for key, value in table[1:]:
        name = key.decode("utf-8", errors="backslashreplace")
        if key.startswith(SLICE):
            sliced = True
            continue
        try:
            entry = _entry(value)
            tensors[name] = _tensor(index_path, name, entry, n_shards, shards)
        except ValueError as error:
            what = f"{index_path}: {printable(name)[:200]} {error}"
            raise _same(error, what) from None
    if sliced:
        raise CorruptInputError(f"{index_path} holds slices of a tensor that it does not name")
    hparams = index_path.parent / HPARAMS
    config: dict[str, Any] = {"hparams": read_json(hparams)} if hparams.is_file() else {}
    return Checkpoint(
        index_path, "TensorFlow", tensors, config, files=(index_path, *shards),
        claim_source="a TensorFlow checkpoint says nothing of a tie",
    )  # fmt: skip


def _same(error: ValueError, text: str) -> UserError | CorruptInputError:
    return UserError(text) if isinstance(error, UserError) else CorruptInputError(text)


def _header(span: Span) -> int:
    """Return the number of shards."""
    n_shards = endianness = min_consumer = 0
    for number, value in span.fields():
        if number == HEADER_SHARDS and isinstance(value, int):
            n_shards = value
        elif number == HEADER_ENDIANNESS and isinstance(value, int):
            endianness = value
        elif number == HEADER_VERSION and isinstance(value, Span):
            inner = dict(value.fields())
            least = inner.get(VERSION_MIN_CONSUMER, 0)
            min_consumer = least if isinstance(least, int) else 0
    if endianness != 0:
        raise UserError("the numbers are big-endian, which is not read here")
    if min_consumer > OUR_VERSION:
        raise UserError(f"version {min_consumer} of the format is not read here, {OUR_VERSION} is")
    if not 1 <= n_shards <= 99_999:
        raise CorruptInputError(f"it claims {n_shards:,} files of data")
    return n_shards


def _entry(span: Span) -> _Entry:
    entry = _Entry()
    for number, value in span.fields():
        if number == ENTRY_SHAPE and isinstance(value, Span):
            entry.shape += _shape(value)
        elif number == ENTRY_CHECKSUM and isinstance(value, Span):
            entry.checksum = int.from_bytes(value.data[value.start : value.stop], "little")
        elif number == ENTRY_SLICES:
            entry.sliced = True
        elif isinstance(value, int):
            if number == ENTRY_TYPE:
                entry.type_number = value
            elif number == ENTRY_SHARD:
                entry.shard = value
            elif number == ENTRY_OFFSET:
                entry.offset = value
            elif number == ENTRY_SIZE:
                entry.size = value
    return entry


def _shape(span: Span) -> list[int]:
    sizes = []
    for number, value in span.fields():
        if number == SHAPE_DIM and isinstance(value, Span):
            size = dict(value.fields()).get(DIM_SIZE, 0)
            if not isinstance(size, int) or size >= 1 << 63:
                raise CorruptInputError("has a negative size in its shape")
            sizes.append(size)
        elif number == SHAPE_UNKNOWN_RANK and value:
            raise CorruptInputError("has no shape")
    if len(sizes) > MAX_DIMS:
        raise CorruptInputError(f"has {len(sizes):,} dimensions")
    return sizes


def _tensor(
    index_path: Path, name: str, entry: _Entry, n_shards: int, shards: dict[Path, int]
) -> StoredTensor:
    """Return a tensor whose bytes are there, as many as its shape needs."""
    if entry.sliced:
        raise UserError("is stored in slices (a partitioned variable): save it whole to read it")
    shape, n_bytes = tuple(entry.shape), entry.size
    dtype, width = TYPES.get(entry.type_number, (f"TensorFlow type {entry.type_number}", 0))
    if entry.type_number == STRING:
        dtype = "string"
    if entry.type_number == 0:
        raise CorruptInputError("has no type")
    if width and n_bytes != math.prod(shape) * width:
        raise CorruptInputError(f"of shape {shape} in {dtype} cannot fill {n_bytes:,} bytes")
    if not entry.shard < n_shards:
        raise CorruptInputError(f"lies in file {entry.shard:,} of {n_shards:,}")
    stem = index_path.name.removesuffix(SUFFIX)
    path = index_path.with_name(f"{stem}.data-{entry.shard:05d}-of-{n_shards:05d}")
    if path not in shards:
        shards[path] = _file_size(index_path, path.name)
    start, stop = entry.offset, entry.offset + n_bytes
    if stop > shards[path]:
        raise CorruptInputError(
            f"claims bytes {start:,} to {stop:,} of {path.name}, which has {shards[path]:,}: it is "
            "cut off or another checkpoint's"
        )
    read = _reader(path, name, start, shape, width, entry) if width else None
    return StoredTensor(name, shape, dtype, n_bytes, Storage(str(path), start, stop), read)


def _file_size(index_path: Path, name: str) -> int:
    try:
        return beside(index_path, name).stat().st_size
    except CorruptInputError as error:
        raise CorruptInputError(f"has no bytes: {error}") from None
    except OSError as error:
        raise CorruptInputError(f"lies in {name}, which is not read: {error.strerror}") from None


def _reader(
    path: Path, name: str, start: int, shape: tuple[int, ...], width: int, entry: _Entry
) -> Read:
    """Return a reader that verifies the checksum of the whole tensor before its first block."""
    plain = plain_reader(path, start, shape[-1] if shape else 1, width)
    bytes_at = plain_reader(path, start, 1, 1)
    verified = False

    def verify() -> None:
        checksum = 0
        for at in range(0, entry.size, BLOCK_BYTES):
            piece = bytes_at(at, min(at + BLOCK_BYTES, entry.size), 0, 1)
            checksum = crc32c_in_place(piece.reshape(-1).view(np.uint8), checksum)
        if masked(checksum) != entry.checksum:
            raise CorruptInputError(
                f"{path}: the bytes of {printable(name)} are not those that were written (their "
                "checksum is another): get the file again"
            )

    def read(first: int, end: int, left: int, right: int) -> Native:
        nonlocal verified
        if not verified:
            verify()
            verified = True
        return plain(first, end, left, right)

    return read
