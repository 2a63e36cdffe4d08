"""TensorFlow checkpoints ("tensor bundles"), read without TensorFlow.

    model.ckpt.index                    tensor name -> dtype, shape, file, offset, checksum
    model.ckpt.data-00000-of-00001      the tensors' bytes, little-endian, row by row

The index is a LevelDB table (LevelDB, doc/table_format.md) whose values are protocol buffers
(tensorflow/core/protobuf/tensor_bundle.proto). The checksum of every block of the index is
verified, and that of a tensor when it is first read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.tensors import (
    BLOCK_BYTES,
    Native,
    Read,
    Storage,
    StoredTensor,
    plain_reader,
    printable,
)

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
"""The last 8 bytes of a LevelDB table."""
FOOTER_BYTES = 48
MAX_INDEX = 4 << 20
"""Bytes of an index; that of GPT-2 XL has 30 KB."""
MAX_KEY = 4096
MAX_DIMS = 64
SLICE = b"\0"
"""The first byte of the name of a slice of a tensor."""
DTYPES = {
    1: ("float32", 4), 2: ("float64", 8), 3: ("int32", 4), 4: ("uint8", 1), 5: ("int16", 2),
    6: ("int8", 1), 7: ("string", 0), 9: ("int64", 8), 10: ("bool", 1), 14: ("bfloat16", 2),
    17: ("uint16", 2), 19: ("float16", 2), 22: ("uint32", 4), 23: ("uint64", 8),
}  # fmt: skip
"""DataType (tensorflow/core/framework/types.proto) -> name and bytes per element; 0: not fixed."""


def is_index(path: Path) -> bool:
    """Whether a file is a LevelDB table, as the index of a checkpoint is."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < FOOTER_BYTES:
            return False
        file.seek(-len(MAGIC), os.SEEK_END)
        return file.read() == MAGIC


def read_bundle(path: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Return the tensors that an index lists, and the files; the data files must lie beside it.

    Raises `CorruptInputError` where a file is damaged, missing or has another length than the
    index says, and `UserError` for big-endian files and partitioned variables.
    """
    table = _read_table(path)
    if not table or table[0][0] != b"":
        raise CorruptInputError(f"{path} is not a TensorFlow checkpoint: it has no header")
    with _naming(f"{path}: its header:"):
        n_files = _read_header(_Message(table[0][1]))
    tensors: dict[str, StoredTensor] = {}
    file_sizes: dict[Path, int] = {}
    for key, value in table[1:]:
        name = key.decode("utf-8", errors="backslashreplace")
        if not key.startswith(SLICE):
            with _naming(f"{path}: {printable(name)[:200]}"):
                tensors[name] = _tensor(path, name, _Message(value), n_files, file_sizes)
    if len(tensors) < len(table) - 1:
        raise CorruptInputError(f"{path} has slices of a tensor that it does not list")
    return tensors, (path, *file_sizes)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Put the file's and the tensor's name before the message of an error."""
    try:
        yield
    except (UserError, CorruptInputError) as error:
        raise type(error)(f"{what} {error}") from None


def _read_header(header: _Message) -> int:
    """Return the number of data files.

    BundleHeaderProto: 1 num_shards, 2 endianness, 3 version (2 min_consumer).
    """
    n_files, endianness = header.number(1), header.number(2)
    oldest_reader = max((version.number(2) for version in header.messages(3)), default=0)
    if endianness != 0:
        raise UserError("the numbers are big-endian, which is not supported")
    if oldest_reader > 1:
        raise UserError(f"version {oldest_reader} of the format is not supported, version 1 is")
    if not 1 <= n_files <= 99_999:
        raise CorruptInputError(f"it claims {n_files:,} data files")
    return n_files


def _tensor(
    index: Path, name: str, entry: _Message, n_files: int, file_sizes: dict[Path, int]
) -> StoredTensor:
    """Return a tensor, whose bytes must be in the data file.

    BundleEntryProto: 1 dtype, 2 shape, 3 shard_id, 4 offset, 5 size, 6 crc32c, 7 slices.
    """
    number, file, start, n_bytes = (entry.number(field) for field in (1, 3, 4, 5))
    if entry.messages(7):
        raise UserError("is stored in slices (a partitioned variable): save it as one tensor")
    if number == 0:
        raise CorruptInputError("has no type")
    shape = _shape(entry.messages(2))
    dtype, width = DTYPES.get(number, (f"TensorFlow type {number}", 0))
    if width and n_bytes != math.prod(shape) * width:
        raise CorruptInputError(f"of shape {shape} in {dtype} cannot fill {n_bytes:,} bytes")
    if file >= n_files:
        raise CorruptInputError(f"lies in file {file:,} of {n_files:,}")
    path = index.with_name(f"{index.name.removesuffix('.index')}.data-{file:05}-of-{n_files:05}")
    if path not in file_sizes:
        file_sizes[path] = _file_size(index, path.name)
    if start + n_bytes > file_sizes[path]:
        raise CorruptInputError(
            f"claims bytes {start:,} to {start + n_bytes:,} of {path.name}, which has "
            f"{file_sizes[path]:,}: it is cut off or belongs to another checkpoint"
        )
    reader = plain_reader(path, start, shape[-1] if shape else 1, width) if width else None
    if reader:
        what = f"{path}: the bytes of {printable(name)[:200]}"
        reader = _verifying(reader, plain_reader(path, start, n_bytes, 1), n_bytes, entry, what)
    return StoredTensor(
        name, shape, dtype, n_bytes, Storage(str(path), start, start + n_bytes), reader
    )


def _shape(messages: list[_Message]) -> tuple[int, ...]:
    """Return the sizes in a shape. TensorShapeProto: 2 dim (1 size), 3 unknown_rank."""
    sizes = tuple(dim.number(1) for message in messages for dim in message.messages(2))
    if any(size >= 1 << 63 for size in sizes):
        raise CorruptInputError("has a negative size in its shape")
    if any(message.number(3) for message in messages):
        raise CorruptInputError("has no shape")
    if len(sizes) > MAX_DIMS:
        raise CorruptInputError(f"has {len(sizes):,} dimensions")
    return sizes


def _file_size(index: Path, name: str) -> int:
    try:
        return beside(index, name).stat().st_size
    except CorruptInputError as error:
        raise CorruptInputError(f"has no bytes: {error}") from None
    except OSError as error:
        raise CorruptInputError(f"lies in {name}, which cannot be read: {error.strerror}") from None


def _verifying(read: Read, read_bytes: Read, n_bytes: int, entry: _Message, what: str) -> Read:
    """Return `read`, which verifies the checksum of the whole tensor before its first block."""

    @cache  # an error is not cached
    def verify() -> None:
        checksum = 0
        for at in range(0, n_bytes, BLOCK_BYTES):
            block = read_bytes(0, 1, at, min(at + BLOCK_BYTES, n_bytes))
            checksum = crc32c(block.tobytes(), checksum)
        if masked(checksum) != entry.number(6):
            raise CorruptInputError(f"{what} do not match their checksum: download the file again")

    def verified_read(first: int, end: int, left: int, right: int) -> Native:
        verify()
        return read(first, end, left, right)

    return verified_read


def crc32c(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C (RFC 3720) of `data` after bytes whose CRC-32C is `before`."""
    library = require_package("google_crc32c", "reading TensorFlow checkpoints")
    checksum: int = library.extend(before, data)
    return checksum


def masked(checksum: int) -> int:
    """Return a CRC-32C as LevelDB stores it (util/crc32c.h): rotated, plus a constant."""
    rotated = checksum >> 15 | checksum << 17 & 0xFFFFFFFF
    return rotated + 0xA282EAD8 & 0xFFFFFFFF


# The LevelDB table.


def _read_table(path: Path) -> list[tuple[bytes, bytes]]:
    """Return all keys, sorted and unique, with their values."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INDEX + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    with _naming(f"{path} is not a valid index of tensors:"):
        if len(data) > MAX_INDEX:
            raise CorruptInputError(f"it is larger than {MAX_INDEX:,} bytes")
        footer = len(data) - FOOTER_BYTES
        if footer < 0 or not data.endswith(MAGIC):
            raise CorruptInputError("it is cut off or another file: its last 8 bytes are wrong")
        _, _, start, size = _varints(data[footer:], 4)  # of the meta index, then of the index
        entries: list[tuple[bytes, bytes]] = []
        stop = 0
        for _, place in _pairs(_block(data, start, size, footer)):
            start, size = _varints(place, 2)
            if start < stop:
                raise CorruptInputError(f"two blocks contain byte {start:,}")
            stop = start + size
            for key, value in _pairs(_block(data, start, size, footer)):
                if entries and key <= entries[-1][0]:
                    raise CorruptInputError(f"the key {key[:80]!r} is repeated or out of order")
                entries.append((key, value))
    return entries


def _block(data: bytes, start: int, size: int, end: int) -> bytes:
    """Return the pairs of a block; its checksum must be right and its bytes not compressed."""
    stop = start + size
    if size < 4 or stop + 5 > end:
        raise CorruptInputError(f"a block of {size:,} bytes at byte {start:,} is not in the file")
    compression, checksum = struct.unpack_from("<BI", data, stop)
    if masked(crc32c(data[start : stop + 1])) != checksum:
        raise CorruptInputError(f"the block at byte {start:,} does not match its checksum")
    if compression == 1:
        raise CorruptInputError("its blocks are compressed: save it with TensorFlow 1.2 or later")
    if compression != 0:
        raise CorruptInputError(f"the block at byte {start:,} has an unknown compression")
    (n_restarts,) = struct.unpack_from("<I", data, stop - 4)
    if 4 * n_restarts + 4 > size:
        raise CorruptInputError(f"the block at byte {start:,} claims {n_restarts:,} restart points")
    return data[start : stop - 4 * n_restarts - 4]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values; a key is stored without the bytes it shares with the one before."""
    key, at = b"", 0
    while at < len(block):
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        size, at = _varint(block, at)
        if shared > len(key) or shared + own > MAX_KEY or own + size > len(block) - at:
            raise CorruptInputError("a key or a value is longer than its block")
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + size]
        at += size


# Protocol buffers (protobuf.dev, "Encoding").


class _Message:
    """A message: the numbers and the messages in each of its fields."""

    def __init__(self, data: bytes) -> None:
        self._numbers: dict[int, int] = {}
        self._messages: dict[int, list[bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            field, wire_type = tag >> 3, tag & 7
            if field == 0 or wire_type not in (0, 1, 2, 5):
                raise CorruptInputError("is not a valid message")
            if wire_type == 0:
                self._numbers[field], at = _varint(data, at)
                continue
            size, at = _varint(data, at) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], at)
            if size > len(data) - at:
                raise CorruptInputError(
                    f"is cut off: a field claims {size:,} bytes, {len(data) - at:,} are left"
                )
            value = data[at : at + size]
            at += size
            if wire_type == 2:
                self._messages.setdefault(field, []).append(value)
            else:
                self._numbers[field] = int.from_bytes(value, "little")

    def number(self, field: int) -> int:
        """Return the last number in a field; 0, the default value, if there is none."""
        return self._numbers.get(field, 0)

    def messages(self, field: int) -> list[_Message]:
        """Return all messages in a field."""
        return [_Message(data) for data in self._messages.get(field, [])]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at byte `at`, and where the next byte is."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value & (1 << 64) - 1, at
    raise CorruptInputError(f"is cut off: a number does not end at byte {at:,}")


def _varints(data: bytes, n: int) -> list[int]:
    numbers, at = [], 0
    for _ in range(n):
        number, at = _varint(data, at)
        numbers.append(number)
    return numbers
