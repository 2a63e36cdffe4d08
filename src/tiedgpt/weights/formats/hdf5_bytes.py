"""The bytes of an HDF5 file, which may lie inside another file, and what of them was visited.

Each structure is read once, within the file and within a budget: so a small file that points to
itself, or a lying length, takes neither time nor memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import BinaryIO

from tiedgpt.errors import CorruptInputError, UserError

MAX_OBJECTS = 1 << 17
AGAIN = "save it again with Keras or h5py's default options"


@dataclass
class Hdf5Bytes:
    """A range of a file that is an HDF5 file of its own, and what of it was visited."""

    file: BinaryIO
    label: str
    begin: int
    size: int
    visited: set[int] = field(default_factory=set)
    n_read: int = 0

    def at(self, address: int, length: int, what: str) -> bytes:
        """Return bytes that must be there."""
        if not 0 <= address <= self.size - length:
            raise self.corrupt(f"{what} at byte {address:,} lies outside it")
        self.n_read += length
        if self.n_read > 2 * self.size + (1 << 16):
            raise self.corrupt("its structures lie on each other")
        self.file.seek(self.begin + address)
        data = self.file.read(length)
        if len(data) < length:
            raise self.corrupt("it was cut off while it was read")
        return data

    def visit(self, address: int, what: str) -> None:
        """Refuse to come a second time to what may be there once."""
        if address in self.visited:
            raise self.corrupt(f"{what} at byte {address:,} is reached twice")
        self.visited.add(address)
        if len(self.visited) > MAX_OBJECTS:
            raise self.corrupt(f"it has more than {MAX_OBJECTS:,} parts")

    def unpack(self, layout: str, data: bytes, at: int = 0) -> tuple[int, ...]:
        """Return the numbers at a place in a message."""
        if len(data) < at + struct.calcsize(layout):
            raise self.corrupt("a message is cut off")
        return struct.unpack_from(layout, data, at)

    def corrupt(self, why: str) -> CorruptInputError:
        """Return the error of a damaged file."""
        return CorruptInputError(f"{self.label} is a damaged HDF5 file: {why}")

    def refused(self, what: str) -> UserError:
        """Return the error of a sound file that has what is not read here."""
        return UserError(f"{self.label}: {what} is not read here: {AGAIN}")
