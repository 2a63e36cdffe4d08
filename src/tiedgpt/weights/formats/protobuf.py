"""Protocol buffers' wire format, read where it lies: fields are walked, nothing is copied.

A message is a run of (tag, value); tag = field number << 3 | wire type (protobuf.dev,
"Encoding"). A length is checked against the enclosing message before it is believed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

from tiedgpt.errors import CorruptInputError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_TEXT = 64 << 10
_SIZES = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a file, mapped or read, that hold a message or a run of values."""

    data: mmap.mmap | bytes
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def text(self) -> str:
        """Return the bytes as text: a name, never more than 64 KiB."""
        if len(self) > MAX_TEXT:
            raise CorruptInputError(f"a name of {len(self):,} bytes at byte {self.start:,} is none")
        return self.data[self.start : self.stop].decode("utf-8", errors="replace")

    def fields(self) -> Iterator[tuple[int, int | Span]]:
        """Yield (field number, value): an int for a varint, else a Span over the bytes."""
        at = self.start
        while at < self.stop:
            tag, at = self.varint(at)
            number, kind = tag >> 3, tag & 7
            if number == 0:
                raise CorruptInputError(f"no message: field 0 at byte {at:,}")
            if kind == VARINT:
                value, at = self.varint(at)
                yield number, value
                continue
            if kind == BYTES:
                size, at = self.varint(at)
            elif kind in _SIZES:
                size = _SIZES[kind]
            else:
                raise CorruptInputError(f"no message: wire type {kind} at byte {at:,}")
            if size > self.stop - at:
                raise CorruptInputError(
                    f"cut off or lying: {size:,} bytes are claimed at byte {at:,} and "
                    f"{self.stop - at:,} are left"
                )
            yield number, Span(self.data, at, at + size)
            at += size

    def varints(self) -> list[int]:
        """Return a packed run of varints."""
        numbers, at = [], self.start
        while at < self.stop:
            number, at = self.varint(at)
            numbers.append(number)
        return numbers

    def varint(self, at: int) -> tuple[int, int]:
        """Return the number that begins at byte `at`, and the byte after it."""
        value = shift = 0
        while at < self.stop and shift < 70:
            byte = self.data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & (1 << 64) - 1, at
            shift += 7
        raise CorruptInputError(f"cut off or lying: a number does not end at byte {at:,}")
