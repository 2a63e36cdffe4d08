"""Token shards in llm.c's `.bin` format.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros)
followed by the tokens as little-endian uint16. `ShardWriter` writes ids; `Shards` reads all files
as one long sequence of uint16.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import remove, writing
from tiedgpt.signatures import checked

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


@dataclass
class ShardWriter:
    """Write ids into `{prefix}_000000.bin`, `{prefix}_000001.bin`, ... of a directory.

    Use it in a `with` block. A shard is on the disk when the next one begins or the block ends; an
    exception in the block removes the shard that was being written.

    Raises:
        UserError: vocab_size is above 65,536, a shard exists, or the directory is not writable.
        NoRoomError: the disk is full; the unfinished shard is removed.
    """

    directory: str | Path
    prefix: str
    _: KW_ONLY
    vocab_size: int
    tokens_per_shard: int = TOKENS_PER_SHARD
    paths: list[Path] = field(default_factory=list, init=False)
    n_tokens: int = field(default=0, init=False)
    _file: BinaryIO | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_vocabulary(self.vocab_size)
        if not 1 <= self.tokens_per_shard < 2**31:
            raise UserError(f"tokens_per_shard must be 1 to 2**31 - 1, got {self.tokens_per_shard}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        try:
            if error_type is None:
                self.close()
        finally:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
                remove(self.paths.pop())

    def write(self, ids: NDArray[Any]) -> None:
        """Append ids (n,) of any integer dtype, and close each full shard."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise UserError(
                f"ids {ids.min()} to {ids.max()} are outside a vocabulary of {self.vocab_size:,}"
            )
        tokens = ids.astype("<u2", copy=False)
        while tokens.size:
            chunk = tokens[: self.tokens_per_shard - self.n_tokens % self.tokens_per_shard]
            if self._file is None:
                path = Path(self.directory) / f"{self.prefix}_{len(self.paths):06d}.bin"
                with writing(path):
                    self._file = open(path, "xb")
                self.paths.append(path)
                self._file.write(header(0))
            with writing(self.paths[-1]):
                self._file.write(chunk.tobytes())
            self.n_tokens += chunk.size
            tokens = tokens[chunk.size :]
            if self.n_tokens % self.tokens_per_shard == 0:
                self.close()

    def close(self) -> None:
        """Finish the shard that is being written, if there is one."""
        if self._file is not None:
            with writing(self.paths[-1]):
                before = (len(self.paths) - 1) * self.tokens_per_shard
                self._file.seek(0)
                self._file.write(header(self.n_tokens - before))
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            self._file = None


class Shards:
    """Token files as one sequence of uint16: `len(shards)` tokens, read by position.

    The files are memory-mapped. Every read first checks that its file is unchanged, because
    reading a mapped page beyond the end of a file would kill the process.

    Raises:
        UserError: a file is missing.
        CorruptInputError: a file is not a shard, or its length does not match its header.
    """

    @checked
    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [Path(path) for path in paths]
        self._states = [_state(path) for path in self.paths]
        self._tokens = [_map_tokens(path) for path in self.paths]
        self._starts = list(accumulate(map(len, self._tokens), initial=0))

    @classmethod
    def in_directory(cls, directory: str | Path, prefix: str) -> Self:
        """Open all shards `{prefix}_*.bin` of a directory, or of its units, in order."""
        name = f"{prefix}_*.bin"
        paths = sorted([*Path(directory).glob(name), *Path(directory).glob(f"[0-9]*/{name}")])
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
            if _state(self.paths[shard]) != self._states[shard]:
                raise CorruptInputError(
                    f"{self.paths[shard]} changed while training",
                    hint="leave the file alone, or encode the text again and resume",
                )
            first = self._starts[shard]
            parts.append(self._tokens[shard][start - first : stop - first])
            start += len(parts[-1])
            shard += 1
        return np.concatenate(parts)


def require_vocabulary(size: int) -> None:
    """Raise `UserError` for more tokens than a shard can name."""
    if size > LARGEST_VOCABULARY:
        raise UserError(
            f"a vocabulary of {size:,} tokens does not fit a shard's 16 bits",
            hint=f"use a tokenizer of at most {LARGEST_VOCABULARY:,}",
        )


def _map_tokens(path: Path) -> TokenArray:
    """Check a shard's header and map its tokens, (n_tokens,)."""
    try:
        size = path.stat().st_size
        n_tokens = max(0, size - HEADER_BYTES) // 2
        fields = np.fromfile(path, dtype="<i4", count=3)
        if fields.tolist() != [MAGIC, VERSION, n_tokens] or size != HEADER_BYTES + 2 * n_tokens:
            raise CorruptInputError(
                f"{path} is damaged or is no token shard: its {size:,} bytes do not fit its "
                "header; encode the text again"
            )
        return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(n_tokens,))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", hint="check the file"
        ) from error


def _state(path: Path) -> tuple[int, ...] | None:
    """Return numbers that differ once a file was truncated, written to or replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
