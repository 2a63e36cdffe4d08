"""Token shards in llm.c's `.bin` format.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros)
followed by the tokens as little-endian uint16. `ShardWriter` writes ids; `Shards` reads all files
as one long sequence of uint16.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import replacing, writing

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

    Use it in a `with` block. A shard gets its name when it is complete and on the disk; an
    exception in the block removes the shard that was being written.

    Raises:
        UserError: vocab_size is above 65,536, a shard exists, or the directory is not writable.
        NoRoomError: the disk is full; the unfinished shard is removed.
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
            raise UserError(f"tokens_per_shard must be 1 to 2**31 - 1, got {tokens_per_shard}")
        self.directory = Path(directory)
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.tokens_per_shard = tokens_per_shard
        self.paths: list[Path] = []
        self.n_tokens = 0
        self._shard = ExitStack()  # finishes the shard that is being written, or removes it
        self._file: BinaryIO | None = None
        self._room = 0  # tokens that still fit into that shard

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
            return
        with suppress(_Abandoned, TiedGPTError), self._shard:
            raise _Abandoned

    def write(self, ids: NDArray[Any]) -> None:
        """Append ids (n,) of any integer dtype. A shard is finished as soon as it is full."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise UserError(
                f"ids {ids.min()} to {ids.max()} are outside a vocabulary of {self.vocab_size:,}"
            )
        tokens = ids.astype("<u2", copy=False)
        while tokens.size:
            if self._file is None:
                self.paths.append(self.directory / f"{self.prefix}_{len(self.paths):06d}.bin")
                self._file = self._shard.enter_context(_new_shard(self.paths[-1]))
                self._room = self.tokens_per_shard
            part = tokens[: self._room]
            with writing(self.paths[-1]):
                self._file.write(part.tobytes())
            self.n_tokens += part.size
            self._room -= part.size
            tokens = tokens[part.size :]
            if not self._room:
                self.close()

    def close(self) -> None:
        """Finish the shard that is being written, if there is one."""
        self._shard.close()
        self._file = None


class _Abandoned(Exception):
    """Raised inside `_new_shard` to remove the unfinished file."""


@contextmanager
def _new_shard(path: Path) -> Iterator[BinaryIO]:
    """Give a file to append tokens to; it becomes the shard `path` when the block ends well."""
    if path.exists():
        raise UserError(f"{path} exists: remove it or write to another directory")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: {path.parent} is not a directory; create it first")
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(header(0))
        yield file
        n_tokens = (file.tell() - HEADER_BYTES) // 2
        file.seek(0)
        file.write(header(n_tokens))


class Shards:
    """Token files as one sequence of uint16: `len(shards)` tokens, read by position.

    The files are mapped, not loaded. A file must not change while it is open: that is checked
    before every read, because reading a mapped page that is gone would kill the process.

    Raises:
        UserError: there are no files, or one is missing.
        CorruptInputError: a file is not a shard, or its length does not match its header.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        if not paths:
            raise UserError("no token shards were named: encode some text first")
        self.paths = [Path(path) for path in paths]
        self._states = [_state(path) for path in self.paths]
        self._tokens = [_map_tokens(path) for path in self.paths]
        self._starts = list(accumulate(map(len, self._tokens), initial=0))

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
            CorruptInputError: a file that holds them has changed since it was opened.
        """
        parts = [np.empty(0, dtype=np.uint16)]
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[shard : shard + 2]
            if start < end:
                self._require_unchanged(shard)
                parts.append(self._tokens[shard][start - first : stop - first])
                start = end
            shard += 1
        return np.concatenate(parts)

    def _require_unchanged(self, shard: int) -> None:
        if _state(self.paths[shard]) != self._states[shard]:
            raise CorruptInputError(
                f"{self.paths[shard]} changed while training: leave the file alone, or encode the "
                "text again and resume"
            )


def _map_tokens(path: Path) -> TokenArray:
    """Check a shard's header and map its tokens, (n_tokens,)."""
    try:
        size = path.stat().st_size
        fields = np.zeros(256, dtype="<i4")
        start = np.fromfile(path, dtype="<i4", count=256)
        fields[: len(start)] = start
        magic, version, n_tokens = map(int, fields[:3])
        if magic != MAGIC or version != VERSION:
            raise CorruptInputError(
                f"{path} is not a token shard: expected magic {MAGIC}, version {VERSION}, got "
                f"{magic}, {version}; encode the text again"
            )
        expected = HEADER_BYTES + 2 * n_tokens
        if n_tokens < 0 or size != expected:
            raise CorruptInputError(
                f"{path} is damaged: its header says {n_tokens:,} tokens ({expected:,} bytes), "
                f"the file has {size:,} bytes; encode the text again"
            )
        return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(n_tokens,))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the file") from error


def _state(path: Path) -> tuple[int, ...] | None:
    """Return numbers that differ once a file was truncated, written to or replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
