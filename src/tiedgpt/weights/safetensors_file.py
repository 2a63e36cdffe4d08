"""The safetensors format: the library checks a header, tensors are read and written one by one.

Layout (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON header of
`name: {dtype, shape, data_offsets}`, then the tensors' bytes without holes. Tensors are read by
place, since the library's numpy reader has no bfloat16. Reading a header needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, LazyTensor
from tiedgpt.weights.tensors import BLOCK_BYTES, Native, Storage, StoredTensor, plain_reader

if TYPE_CHECKING:
    from torch import Tensor, dtype

MAX_HEADER = 32 << 20
"""Bytes; GPT-3 of 175 billion parameters has a header of 120,000."""
TORCH_NAMES = {
    "F64": "float64", "I64": "int64", "F32": "float32", "I32": "int32", "F16": "float16",
    "BF16": "bfloat16", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
PACKED_FORMAT = "tiedgpt-packed"
"""`metadata["format"]` of a file that is packed for our CPU kernels; it has a reader of its own."""


def detect(path: Path, head: bytes) -> bool:
    """Whether a file begins with a header's length, below 4 GB, and a JSON object."""
    return path.suffix == ".safetensors" or head[4:9] == b"\0\0\0\0{"


def read(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; only its header is read."""
    file = SafetensorsFile.open(path)
    if file.metadata.get("format") == PACKED_FORMAT:
        from tiedgpt.weights import packed

        return packed.read(path)
    tensors = {name: file.stored(name) for name in file.entries}
    return Checkpoint(path, "safetensors", tensors, files=(path,))


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file: its type, its shape, its first byte and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header was read and agrees with the file's size."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header; `CorruptInputError` where it is wrong or the file cut off."""
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > MAX_HEADER:
                    raise CorruptInputError(
                        f"{path} is no safetensors file: a header of {length:,} bytes"
                    )
                with safe_open(path, framework="numpy"):  # types, sizes, offsets, the file's size
                    header = json.loads(file.read(length))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        except (SafetensorError, RecursionError, ValueError) as error:
            if isinstance(error, CorruptInputError):
                raise
            raise CorruptInputError(f"{path} is damaged or no safetensors file: {error}") from None
        metadata = header.pop("__metadata__", None) or {}
        entries = {}
        for name, value in header.items():
            start, end = value["data_offsets"]
            entries[name] = Entry(
                value["dtype"], tuple(value["shape"]), 8 + length + start, end - start
            )
        return cls(path, entries, metadata)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor that is read when it is asked for its numbers."""
        entry = self.entries[name]
        bits = re.search(r"\d+", entry.dtype)
        width = int(bits[0]) // 8 if bits else 1
        columns = entry.shape[-1] if entry.shape else 1
        reader = plain_reader(self.path, entry.start, columns, width) if width else None
        return StoredTensor(
            name,
            entry.shape,
            TORCH_NAMES.get(entry.dtype, entry.dtype.lower()),
            entry.size,
            Storage(str(self.path), entry.start, entry.start + entry.size),
            reader,
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        return LazyTensor(self.stored(name)).bits()


@dataclass(frozen=True)
class Stored:
    """A torch tensor to be written, whether its two axes change places, and its type in the file.

    Numbers beyond float16's are a `UserError` where they would become infinite.
    """

    tensor: Tensor
    transposed: bool = False
    written_as: dtype | None = None
    """None: the tensor's own type."""

    @property
    def format_name(self) -> str:
        """The format's name of its type."""
        return _format_name(str(self.written_as or self.tensor.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return tuple(self.tensor.shape[::-1] if self.transposed else self.tensor.shape)

    @property
    def n_bytes(self) -> int:
        """The bytes it takes in the file."""
        return self.tensor.numel() * (self.written_as or self.tensor.dtype).itemsize

    def blocks(self) -> Iterator[Native]:
        """Yield its bytes, all at once."""
        import torch

        from tiedgpt.weights.plain_model import converted

        tensor = converted("the model", self.tensor, self.written_as or self.tensor.dtype)
        tensor = (tensor.T if self.transposed else tensor).contiguous()
        yield tensor.flatten().view(torch.uint8).numpy()


@dataclass(frozen=True)
class Copy:
    """A stored tensor to be copied, or only its first `rows` rows; its bytes are never decoded."""

    tensor: StoredTensor
    rows: int | None = None

    @property
    def format_name(self) -> str:
        """The format's name of its type; `UserError` if it has none."""
        return _format_name(self.tensor.dtype, self.tensor.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the new file."""
        return self.tensor.shape if self.rows is None else (self.rows, *self.tensor.shape[1:])

    @property
    def n_bytes(self) -> int:
        """The bytes it takes in the new file."""
        if self.rows is None or not self.tensor.count:
            return self.tensor.n_bytes
        return self.tensor.n_bytes // self.tensor.shape[0] * self.rows

    def blocks(self) -> Iterator[Native]:
        """Yield the bytes in order, a few megabytes at a time."""
        tensor, (rows, _) = self.tensor, self.tensor.matrix_shape
        if len(self.shape) == 1:
            yield tensor.native(0, 1, 0, self.shape[0])
            return
        end = math.prod(self.shape[:-1])
        step = max(1, BLOCK_BYTES * rows // max(1, tensor.n_bytes))
        for start in range(0, end, step):
            yield tensor.native(start, min(end, start + step))


def _format_name(torch_name: str, what: str = "a tensor") -> str:
    if torch_name not in NAMES:
        raise UserError(f"{what} is {torch_name}, which is not written to safetensors here")
    return NAMES[torch_name]


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Stored | Copy],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
) -> None:
    """Write tensors in the order given; besides them, a block of bytes is in memory at a time.

    The `safetensors` library takes every tensor as bytes before it writes the first, which doubles
    the memory of a model whose matrices are transposed or rounded, and cannot copy from another
    file. The first tensor begins at a multiple of `alignment` bytes, a multiple of 8. `path` is
    written in place: give a temporary one (`files.replacing`).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.n_bytes
        entry = {"dtype": tensor.format_name, "shape": tensor.shape, "data_offsets": [at, end]}
        header[name], at = entry, end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % alignment)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            for block in tensor.blocks():
                file.write(np.ascontiguousarray(block).data)
