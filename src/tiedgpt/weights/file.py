"""A file of a checkpoint or a tokenizer, opened once for all that is read of it."""

from __future__ import annotations

import io
import mmap
import os
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import CorruptInputError
from tiedgpt.files import reading

HEAD_BYTES = 1 << 16
"""Number of first bytes that `OpenFile.head` holds."""


class OpenFile:
    """An open file with its first bytes, the names of its members, and its blocks.

    Raises `UserError` if it cannot be read.
    """

    def __init__(self, path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> None:
        self.path, self._lock = path, Lock()
        self.read = read
        """Function that reads another file."""
        with reading(path, "file"):
            self._raw = path.open("rb", buffering=0)
            finalize(self, self._raw.close)
            self.head: bytes = self._raw.read(HEAD_BYTES)
            """The first bytes, by which a format recognizes it."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        return os.fstat(self._raw.fileno()).st_size

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Names of the members of a zip file; () for any other, and for a damaged one."""
        if not self.head.startswith(b"PK"):
            return ()
        try:
            with zipfile.ZipFile(self.stream()) as members:
                return tuple(members.namelist())
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
            return ()

    def stream(self) -> BinaryIO:
        """Return a reader at the start of the file. Two of them at a time disturb each other."""
        self._raw.seek(0)
        return io.BufferedReader(io.FileIO(self._raw.fileno(), closefd=False))

    def map(self) -> mmap.mmap:
        """Return the bytes of the file, mapped into memory."""
        return mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ)

    def read_block(
        self, start: int, width: int, columns: int, first: int, end: int, low: int, high: int
    ) -> NDArray[Any]:
        """Return rows [first, end), columns [low, high) of the matrix from byte `start` on.

        Its items have `width` bytes. Raises `CorruptInputError` for a file that is too short.
        """
        block = np.empty((end - first, high - low), f"<u{width}")
        is_whole = (low, high) == (0, columns)
        with self._lock, reading(self.path, "file of tensors"):
            for row, run in enumerate([block] if is_whole else block, first):
                missing = run.reshape(-1).view(np.uint8).data
                self._raw.seek(start + (row * columns + low) * width)
                # The system reads at most 2 GB at once.
                while n_bytes := self._raw.readinto(missing):
                    missing = missing[n_bytes:]
                if missing.nbytes:
                    raise CorruptInputError(f"{self.path} was cut off while it was read")
        return block
