"""Protocol buffers' wire format, written: a message is a list of parts, its size known beforehand.

Small values are bytes at once; what is large (a tensor's data) is a `Payload`, asked for its bytes
only when the file is written. So a message of gigabytes is put together in no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

from tiedgpt.weights.formats.protobuf import BYTES, FIXED32, VARINT


class Payload(Protocol):
    """Bytes that are made when they are written."""

    @property
    def n_bytes(self) -> int:
        """How many there are."""

    def blocks(self) -> Iterator[memoryview]:
        """Yield them in order, a block in memory at a time."""


Part = bytes | Payload
Message = list[Part]


def varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first; a negative one as 64 bits."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number(field: int, value: int) -> Message:
    """A field that holds a whole number."""
    return [varint(field << 3 | VARINT) + varint(value)]


def real(field: int, value: float) -> Message:
    """A field that holds a float32."""
    return [varint(field << 3 | FIXED32) + struct.pack("<f", value)]


def text(field: int, value: str) -> Message:
    """A field that holds text."""
    return message(field, [value.encode()])


def message(field: int, parts: Message) -> Message:
    """A field that holds a message, or bytes."""
    return [varint(field << 3 | BYTES) + varint(size_of(parts)), *parts]


def size_of(parts: Message) -> int:
    """Return the bytes that the parts take."""
    return sum(len(part) if isinstance(part, bytes) else part.n_bytes for part in parts)
