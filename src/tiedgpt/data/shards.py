"""Token shards in the `.bin` format of llm.c: files of tokens that are read in place.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros)
and then the tokens as little-endian uint16. Ids go into a `ShardWriter`; `Shards` gives them back
as one long sequence of uint16, whatever the number of files.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import sync, writing

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
LARGEST_VOCABULARY = 65_536
TOKENS_PER_SHARD = 100_000_000

TokenArray = NDArray[np.uint16]


def header(n_tokens: int) -> bytes:
    """Return the 1,024 bytes before the tokens."""
    fields = np.zeros(256, dtype="<i4")
    fields[:3] = MAGIC, VERSION, n_tokens
    return fields.tobytes()


class ShardWriter:
    """Write ids into `{prefix}_000000.bin`, `{prefix}_000001.bin`, ... of a directory.

    A shard appears under its name when it is complete and on the disk. Leaving a `with` block by an
    exception removes the shard that was being written.

    Raises:
        UserError: the vocabulary has ids above 65,535, a shard exists, or the path is not writable.
        NoRoomError: the disk is full; nothing half-written is left.
    """

    def __init__(
        self,
        directory: str | Path,
        prefix: str,
        *,
        vocab_size: int,
        tokens_per_shard: int = TOKENS_PER_SHARD,
    ) -> None:
        if vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f"a vocabulary of {vocab_size:,} tokens does not fit a shard's 16 bits: "
                f"use a tokenizer of at most {LARGEST_VOCABULARY:,}"
            )
        if not 1 <= tokens_per_shard < 2**31:
            raise UserError(f"tokens_per_shard must be 1 to 2**31 - 1, not {tokens_per_shard}")
        self.directory = Path(directory)
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.tokens_per_shard = tokens_per_shard
        self.paths: list[Path] = []
        self.n_tokens = 0
        self._file: BinaryIO | None = None
        self._in_shard = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def write(self, ids: NDArray[Any]) -> None:
        """Append ids (any number, any integer dtype); full shards are finished on the way."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise UserError(
                f"ids {ids.min()} to {ids.max()} go beyond a vocabulary of {self.vocab_size:,}"
            )
        tokens = ids.astype("<u2", copy=False)
        while tokens.size:
            part = tokens[: self.tokens_per_shard - self._in_shard]
            with self._cleaning_up():
                if self._file is None:
                    self._file = open(self._partial, "wb")
                    self._file.write(header(0))
                self._file.write(np.ascontiguousarray(part).data)
            self._in_shard += part.size
            self.n_tokens += part.size
            tokens = tokens[part.size :]
            if self._in_shard == self.tokens_per_shard:
                self.close()

    def close(self) -> None:
        """Finish the shard at hand, if there is one, and give it its name."""
        if self._file is None:
            return
        with self._cleaning_up():
            if self._path.exists():
                raise UserError(f"{self._path} exists: remove it or write to another directory")
            self._file.seek(0)
            self._file.write(header(self._in_shard))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.rename(self._partial, self._path)
            sync(self.directory)
        self.paths.append(self._path)
        self._file, self._in_shard = None, 0

    @property
    def _path(self) -> Path:
        return self.directory / f"{self.prefix}_{len(self.paths):06d}.bin"

    @property
    def _partial(self) -> Path:
        return self._path.with_suffix(".partial")

    @contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        try:
            with writing(self._path):
                yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what is buffered may not fit either
                self._file.close()
            self._partial.unlink(missing_ok=True)
            self._file, self._in_shard = None, 0


class Shards:
    """Token files as one sequence of uint16: `len(shards)` tokens, read by position.

    The files are read in place, not loaded, and not mapped: reading a mapped page that is gone
    kills the process. A file that was changed meanwhile is noticed before what it held is used.

    Raises:
        UserError: there are no files, or one is missing.
        CorruptInputError: a file is no shard, or its length is not what its header says.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        if not paths:
            raise UserError("no token shards were named: encode some text first")
        self.paths = [Path(path) for path in paths]
        self._files: list[int] = []
        self._closer = weakref.finalize(self, _close_all, self._files)
        self._states: list[tuple[int, int, bool]] = []
        self._sizes: list[int] = []
        for path in self.paths:
            self._open(path)
        self._starts = list(accumulate(self._sizes, initial=0))

    @classmethod
    def in_directory(cls, directory: str | Path, prefix: str) -> Self:
        """Open all shards `{prefix}_*.bin` of a directory, in order."""
        paths = sorted(Path(directory).glob(f"{prefix}_*.bin"))
        if not paths:
            raise UserError(f"no {prefix}_*.bin in {directory}: encode some text first")
        return cls(paths)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> TokenArray:
        """Return a copy of tokens `start` to `stop` (0 <= start <= stop <= len), (stop - start,).

        Raises:
            CorruptInputError: a file that holds them was changed since it was opened.
        """
        parts = []
        shard = bisect_right(self._starts, start, hi=len(self._sizes)) - 1
        while start < stop:
            first = self._starts[shard]
            until = min(stop, self._starts[shard + 1])
            if start < until:
                parts.append(self._read(shard, start - first, until - first))
                start = until
            shard += 1
        return np.concatenate([np.empty(0, dtype=np.uint16), *parts])

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._closer()

    def _open(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            self._files.append(file)
            size = os.fstat(file).st_size
            fields = np.frombuffer(os.read(file, HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        magic, version, n_tokens = map(int, fields[:3])
        if magic != MAGIC or version != VERSION:
            raise CorruptInputError(
                f"{path} is no token shard: magic {magic}, version {version} where {MAGIC}, "
                f"{VERSION} is expected; encode the text again"
            )
        if n_tokens < 0 or size != HEADER_BYTES + 2 * n_tokens:
            raise CorruptInputError(
                f"{path} is damaged: {size:,} bytes where its header promises {n_tokens:,} tokens "
                f"({HEADER_BYTES + 2 * n_tokens:,} bytes); encode the text again"
            )
        self._sizes.append(n_tokens)
        self._states.append(_state(file))

    def _read(self, shard: int, start: int, stop: int) -> TokenArray:
        """Return tokens of a shard, if it is still the file that was opened."""
        file = self._files[shard]
        try:
            data = _bytes_at(file, HEADER_BYTES + 2 * start, 2 * (stop - start))
        except OSError as error:
            raise CorruptInputError(
                f"cannot read {self.paths[shard]}: {error.strerror}; check the disk"
            ) from error
        if len(data) != 2 * (stop - start) or _state(file) != self._states[shard]:
            raise CorruptInputError(
                f"{self.paths[shard]} changed while training: leave the file alone, or encode the "
                f"text again and resume"
            )
        return np.frombuffer(data, dtype="<u2")


def _bytes_at(file: int, at: int, size: int) -> bytes:
    """Return bytes of a file, fewer where it ends."""
    parts = []
    while size and (part := _read_some(file, size, at)):
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)


def _read_some(file: int, size: int, at: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file, size, at)
    os.lseek(file, at, os.SEEK_SET)  # on Windows
    return os.read(file, size)


def _state(file: int) -> tuple[int, int, bool]:
    """Return what differs once a file was truncated, written to, replaced or removed."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns, status.st_nlink > 0


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
