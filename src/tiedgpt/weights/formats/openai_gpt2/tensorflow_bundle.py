"""TensorFlow checkpoints ("tensor bundles"), read without TensorFlow.

    model.ckpt.index                    tensor name -> dtype, shape, file, offset, checksum
    model.ckpt.data-00000-of-00001      the tensors' bytes, little-endian, row by row

The index is a LevelDB table (LevelDB, doc/table_format.md) whose values are protocol buffers
(tensorflow/core/protobuf/tensor_bundle.proto). The checksum of every block of the index is
verified, and that of a tensor when it is first read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, reading
from tiedgpt.runtime import require_package
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.tensors import Native, Read, StoredTensor, printable, tensor_in_file

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
"""The last 8 bytes of a LevelDB table."""
FOOTER_BYTES = 48
MAX_INDEX = 4 << 20
"""Bytes of an index; that of GPT-2 XL has 30 KB."""
MAX_KEY = 512
"""Bytes of a key. Keys share prefixes, so that without a limit they could outgrow the memory."""
SLICE = b"\0"
"""The first byte of the name of a slice of a tensor."""
TYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string",
    9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 19: "float16", 22: "uint32", 23: "uint64",
}  # fmt: skip
"""DataType (tensorflow/core/framework/types.proto) -> name."""
Message = dict[int, list[int | bytes]]
"""A protocol buffer: field -> its numbers, or the bytes of its texts and messages."""


def is_index(file: OpenFile) -> bool:
    """Whether a file ends as a LevelDB table, as the index of a checkpoint does."""
    stream = file.stream()
    stream.seek(max(0, file.size - len(MAGIC)))
    return stream.read() == MAGIC


def read_bundle(file: OpenFile) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Return the tensors that an index lists, and the files; the data files must lie next to it.

    Raises `CorruptInputError` if a file is damaged, missing or has another length than the
    index says, and `UserError` for big-endian files and partitioned variables.
    """
    with reading(file.path, "index of tensors"):
        return _read_index(file)


def _read_index(index: OpenFile) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Read the header and the entries.

    BundleHeaderProto: 1 num_shards, 2 endianness, 3 version (2 min_consumer).
    """
    path, table = index.path, _table(index.stream().read(MAX_INDEX + 1))
    header = _message(table.pop(b""))
    n_files = _number(header, 1)
    version = max((_number(message, 2) for message in _messages(header, 3)), default=1)
    if _number(header, 2) or version > 1:
        raise UserError(f"{path} is big-endian, or version {version} of the format: not supported")
    tensors: dict[str, StoredTensor] = {}
    files: dict[Path, OpenFile] = {}
    for key, value in table.items():
        name, entry = key.decode("utf-8", errors="backslashreplace"), _message(value)
        if 7 in entry or key.startswith(SLICE):
            raise UserError(
                f"{path}: {printable(name)[:200]} is stored in slices (a partitioned variable): "
                "save it as one tensor"
            )
        stem, number = path.name.removesuffix(".index"), _number(entry, 3)
        file = path.with_name(f"{stem}.data-{number:05}-of-{n_files:05}")
        if file not in files:
            files[file] = OpenFile(beside(path, file.name))
        tensors[name] = _tensor(name, entry, files[file])
    return tensors, (path, *files)


def _tensor(name: str, entry: Message, file: OpenFile) -> StoredTensor:
    """Return a tensor of a data file.

    BundleEntryProto: 1 dtype, 2 shape (2 dim (1 size), 3 unknown_rank), 3 shard_id, 4 offset,
    5 size, 6 crc32c, 7 slices.
    """
    number, start, n_bytes, checksum = (_number(entry, field) for field in (1, 4, 5, 6))
    shapes = _messages(entry, 2)
    shape = tuple(_number(dim, 1) for message in shapes for dim in _messages(message, 2))
    dtype = TYPES.get(number, f"TensorFlow type {number}")
    what = f"{file.path}: the bytes of {printable(name)[:200]}"
    tensor = tensor_in_file(file, name, shape, dtype, start)
    sound = number > 0 and len(shape) <= 64 and max(shape, default=0) < 1 << 40
    sound = sound and not any(_number(message, 3) for message in shapes)
    if not sound or (tensor.read and n_bytes != tensor.n_bytes) or start + n_bytes > file.size:
        raise CorruptInputError(
            f"{what} cannot be {dtype} of shape {str(shape)[:80]} in bytes {start:,} to "
            f"{start + n_bytes:,} of {file.size:,}: a file is cut off or of another checkpoint"
        )
    return replace(tensor, read=_verifying(tensor, checksum, what) if tensor.read else None)


def _verifying(tensor: StoredTensor, expected: int, what: str) -> Read:
    """Return its reader, which verifies the checksum of the whole before the first block."""

    @cache  # an error is not cached
    def verify() -> None:
        checksum = 0
        for block in tensor.blocks():
            checksum = crc32c(block.tobytes(), checksum)
        if mask_checksum(checksum) != expected:
            raise CorruptInputError(
                f"{what} do not match their checksum", hint="download the file again"
            )

    def verified_read(first: int, end: int, low: int, high: int) -> Native:
        verify()
        return tensor.native(first, end, low, high)

    return verified_read


def crc32c(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C (RFC 3720) of `data` after bytes whose CRC-32C is `before`."""
    library = require_package("google_crc32c", "reading TensorFlow checkpoints")
    checksum: int = library.extend(before, data)
    return checksum


def mask_checksum(checksum: int) -> int:
    """Return a CRC-32C as LevelDB stores it (util/crc32c.h): rotated, plus a constant."""
    rotated = checksum >> 15 | checksum << 17 & 0xFFFFFFFF
    return rotated + 0xA282EAD8 & 0xFFFFFFFF


def _table(data: bytes) -> dict[bytes, bytes]:
    """Return the keys and values of a LevelDB table."""
    footer = len(data) - FOOTER_BYTES
    if len(data) > MAX_INDEX or footer < 0 or not data.endswith(MAGIC):
        raise ValueError("its last bytes are wrong, or it is larger than 4 MB")
    _, _, start, size, _ = _varints(data[footer:], 4)  # of the meta index, then of the index
    table: dict[bytes, bytes] = {}
    stop = 0
    for _, handle in _pairs(_block(data, start, size)):
        start, size, _ = _varints(handle, 2)
        if start < stop:  # many blocks of the same bytes would take unbounded time
            raise ValueError("two blocks overlap")
        stop = start + size
        for key, value in _pairs(_block(data, start, size)):
            if key in table:
                raise ValueError("a name is repeated")
            table[key] = value
    return table


def _block(data: bytes, start: int, size: int) -> bytes:
    """Return the pairs of a block, whose checksum is verified."""
    stop = start + size
    if not 4 <= size <= stop <= len(data) - 5:
        raise ValueError("a block lies outside the file")
    compression, checksum = struct.unpack_from("<BI", data, stop)
    if mask_checksum(crc32c(data[start : stop + 1])) != checksum:
        raise ValueError("a block does not match its checksum")
    if compression:
        raise ValueError("its blocks are compressed: save it with TensorFlow 1.2 or later")
    (n_restarts,) = struct.unpack_from("<I", data, stop - 4)
    return data[start : max(start, stop - 4 - 4 * n_restarts)]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values; a key is stored without the bytes it shares with the one before."""
    key, at = b"", 0
    while at < len(block):
        shared, unshared, size, at = _varints(block, 3, at)
        stop = at + unshared + size
        if shared > len(key) or shared + unshared > MAX_KEY or stop > len(block):
            raise ValueError("a name or a value is longer than its block")
        key = key[:shared] + block[at : at + unshared]
        yield key, block[at + unshared : stop]
        at = stop


def _message(data: bytes) -> Message:
    """Parse a protocol buffer (protobuf.dev, "Encoding"); the messages in it stay bytes."""
    message: Message = {}
    at = 0
    while at < len(data):
        tag, at = _varints(data, 1, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = _varints(data, 1, at)
        else:
            size, at = _varints(data, 1, at) if tag & 7 == 2 else [{1: 8, 5: 4}[tag & 7], at]
            value, at = data[at : at + size], at + size
        message.setdefault(tag >> 3, []).append(value)
    if at > len(data):
        raise ValueError("a message is cut off")
    return message


def _messages(message: Message, field: int) -> list[Message]:
    return [_message(raw) for raw in message.get(field, []) if isinstance(raw, bytes)]


def _number(message: Message, field: int) -> int:
    """Return the last number in a field; 0, the default value, if none exists."""
    value = message.get(field, [0])[-1]
    return value if isinstance(value, int) else int.from_bytes(value, "little")


def _varints(data: bytes, n: int, at: int = 0) -> list[int]:
    """Return `n` varints from byte `at` on, and where the next byte is."""
    numbers = []
    for _ in range(n):
        value = shift = 0
        while shift < 70:
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            shift = shift + 7 if byte > 127 else 70
        numbers.append(value & (1 << 64) - 1)
    return [*numbers, at]
