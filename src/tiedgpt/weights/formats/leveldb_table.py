"""LevelDB's table format: keys in order, each with a value. TensorFlow's indexes are such files.

A file is a run of blocks and a footer of 48 bytes: where the block of the index lies, and a magic
number. A block is a run of (key, value), each key without the bytes that it shares with the one
before it, then the offsets of keys that stand whole, which whoever reads all of it needs not; after
it come a byte for the compression and a checksum. The values of the index's block say where the
other blocks lie (LevelDB, doc/table_format.md; TensorFlow, core/lib/io/format.cc).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.formats.crc32c import crc32c, masked
from tiedgpt.weights.formats.protobuf import Span

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_BYTES = 48
TRAILER = struct.Struct("<BI")
PLAIN, SNAPPY = 0, 1
MAX_BYTES = 4 << 20
"""Of a whole table; that of GPT-2's largest checkpoint has 30 KB."""
MAX_KEY = 4096


def read_table(path: Path) -> list[tuple[bytes, Span]]:
    """Return all keys, in order, none twice, and their values; every checksum is verified.

    Raises `CorruptInputError` where the file is damaged or no table, `UserError` where it cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        return _entries(data)
    except ValueError as error:
        raise CorruptInputError(f"{path} is no sound table of tensors: {error}") from None


def _entries(data: bytes) -> list[tuple[bytes, Span]]:
    if len(data) > MAX_BYTES:
        raise CorruptInputError(f"it is larger than {MAX_BYTES:,} bytes")
    footer = len(data) - FOOTER_BYTES
    if footer < 0 or not data.endswith(MAGIC):
        raise CorruptInputError("it is cut off, or another file: its last 8 bytes are not those")
    handles = Span(data, footer, len(data) - len(MAGIC))
    (_, _), at = _handle(handles, footer)
    (start, size), _ = _handle(handles, at)
    entries: list[tuple[bytes, Span]] = []
    after = 0
    for _, value in _pairs(_block(data, start, size, footer)):
        (start, size), _ = _handle(value, value.start)
        if start < after:
            raise CorruptInputError(f"two blocks lie on byte {start:,}")
        after = start + size
        for key, entry in _pairs(_block(data, start, size, footer)):
            if entries and key <= entries[-1][0]:
                raise CorruptInputError(f"the key {key[:80]!r} stands twice or out of order")
            entries.append((key, entry))
    return entries


def _handle(span: Span, at: int) -> tuple[tuple[int, int], int]:
    """Return (start, size) of a block, and the byte after them."""
    start, at = span.varint(at)
    size, at = span.varint(at)
    return (start, size), at


def _block(data: bytes, start: int, size: int, end: int) -> Span:
    """Return the pairs of a block whose checksum is right, without the offsets after them."""
    stop = start + size
    if size < 4 or stop + TRAILER.size > end:
        raise CorruptInputError(f"a block of {size:,} bytes at byte {start:,} is not in the file")
    kind, checksum = TRAILER.unpack_from(data, stop)
    if masked(crc32c(data[start : stop + 1])) != checksum:
        raise CorruptInputError(f"the checksum of the block at byte {start:,} is another")
    if kind == SNAPPY:
        raise CorruptInputError("its blocks are compressed; save it with TensorFlow 1.2 or later")
    if kind != PLAIN:
        raise CorruptInputError(f"the block at byte {start:,} is compressed in an unknown way")
    (n_offsets,) = struct.unpack_from("<I", data, stop - 4)
    if 4 * n_offsets + 4 > size:
        raise CorruptInputError(f"the block at byte {start:,} claims {n_offsets:,} whole keys")
    return Span(data, start, stop - 4 * n_offsets - 4)


def _pairs(block: Span) -> Iterator[tuple[bytes, Span]]:
    key, at = b"", block.start
    while at < block.stop:
        shared, at = block.varint(at)
        own, at = block.varint(at)
        size, at = block.varint(at)
        if shared > len(key) or shared + own > MAX_KEY or own + size > block.stop - at:
            raise CorruptInputError(f"a key or a value at byte {at:,} is longer than what is left")
        key = key[:shared] + block.data[at : at + own]
        at += own
        yield key, Span(block.data, at, at + size)
        at += size
