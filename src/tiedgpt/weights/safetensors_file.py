"""The safetensors format: a checked header, tensors read one at a time, written as a stream.

Layout (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON header of
`name: {dtype, shape, data_offsets}`, then the tensors' bytes without holes. The header is checked
against the file's size before memory is taken for anything. Reading it needs no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, LazyTensor
from tiedgpt.weights.tensors import Storage, StoredTensor, plain_reader

if TYPE_CHECKING:
    from torch import Tensor, dtype

MAX_HEADER = 100_000_000
MAX_TENSORS = 1 << 20
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "C64": 8, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
TORCH_NAMES = {
    "F64": "float64", "I64": "int64", "F32": "float32", "I32": "int32", "F16": "float16",
    "BF16": "bfloat16", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
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
        raw, file_size = _raw_header(path)
        brackets = raw.count(b"{") + raw.count(b"[")
        if brackets > 3 * MAX_TENSORS + 2 or raw.count(b",") > 16 * MAX_TENSORS:
            raise CorruptInputError(f"{path}: its header claims more than {MAX_TENSORS:,} tensors")
        try:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise CorruptInputError(f"{path}: its header is not JSON: {error}") from None
        metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(metadata, dict):
            raise CorruptInputError(f"{path}: its header or its metadata is not an object")
        at = data_start = 8 + len(raw)
        entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
            if entry.start != at:
                raise CorruptInputError(
                    f"{path}: {name!r} overlaps another tensor or leaves a hole"
                )
            at += entry.size
        if at != file_size:
            raise CorruptInputError(
                f"{path} is {'cut off' if file_size < at else 'too long'}: its header describes "
                f"{at:,} bytes, the file has {file_size:,}"
            )
        return cls(path, entries, metadata)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor that is read when it is asked for its numbers."""
        entry = self.entries[name]
        columns = entry.shape[-1] if entry.shape else 1
        return StoredTensor(
            name,
            entry.shape,
            TORCH_NAMES.get(entry.dtype, entry.dtype.lower()),
            entry.size,
            Storage(str(self.path), entry.start, entry.start + entry.size),
            plain_reader(self.path, entry.start, columns, ITEM_BYTES[entry.dtype]),
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        entry = self.entries[name]
        if entry.dtype not in TORCH_NAMES:
            raise UserError(f"{self.path}: {name} is {entry.dtype}, which is not read here")
        return LazyTensor(self.stored(name)).bits()


def _raw_header(path: Path) -> tuple[bytes, int]:
    """Return the header's bytes and the file's size."""
    try:
        with path.open("rb") as file:
            file_size = path.stat().st_size
            head = file.read(8)
            if len(head) < 8:
                raise CorruptInputError(f"{path} is too short to be safetensors")
            (length,) = struct.unpack("<Q", head)
            if length > MAX_HEADER or 8 + length > file_size:
                raise CorruptInputError(
                    f"{path} is not safetensors, or is cut off: its header claims {length:,} bytes "
                    f"of a file of {file_size:,}"
                )
            return file.read(length), file_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a header that names a tensor twice."""
    if len(pairs) != len({name for name, _ in pairs}):
        raise ValueError("a name stands twice")
    return dict(pairs)


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    def whole(number: object) -> bool:
        return type(number) is int and 0 <= number < 2**63

    try:
        name.encode()
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        sound = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= 64
        sound = sound and all(map(whole, [*shape, start, end]))
    except UnicodeEncodeError:
        raise CorruptInputError(f"{path}: the name {name[:80]!r} is no text") from None
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CorruptInputError(f"{path}: the header's entry for {name!r} is malformed")
    if dtype not in ITEM_BYTES:
        raise CorruptInputError(f"{path}: {name!r} has the unknown type {dtype!r}")
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CorruptInputError(
            f"{path}: {name!r} of shape {shape} in {dtype} cannot fill {end - start:,} bytes"
        )
    return Entry(dtype, tuple(shape), data_start + start, end - start)


class Writable(Protocol):
    """A tensor to be written: its size is known beforehand, its bytes come in blocks."""

    @property
    def format_name(self) -> str:
        """The format's name of its type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""

    @property
    def n_bytes(self) -> int:
        """The bytes it takes in the file."""

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield its bytes in order, as arrays of any type."""


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
        bare = str(self.written_as or self.tensor.dtype).removeprefix("torch.")
        for name, torch_name in TORCH_NAMES.items():
            if torch_name == bare:
                return name
        raise UserError(f"tensors of torch.{bare} are not written to safetensors here")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return tuple(self.tensor.shape[::-1] if self.transposed else self.tensor.shape)

    @property
    def n_bytes(self) -> int:
        """The bytes it takes in the file."""
        return self.tensor.numel() * (self.written_as or self.tensor.dtype).itemsize

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield its bytes, all at once."""
        import torch

        own = self.tensor.detach().cpu()
        tensor = own.to(self.written_as or own.dtype)
        if tensor.dtype == torch.float16 and bool((tensor.isinf() & ~own.isinf()).any()):
            raise UserError("there are numbers beyond float16's 65,504: give another precision")
        tensor = (tensor.T if self.transposed else tensor).contiguous()
        yield tensor.flatten().view(torch.uint8).numpy()


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Writable],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
) -> None:
    """Write tensors in the order given; besides them, a block of bytes is in memory at a time.

    The `safetensors` library takes every tensor as bytes before it writes the first, which doubles
    the memory of a model whose matrices are transposed or rounded, and cannot copy from another
    file. So the header is written here. The first tensor begins at a multiple of `alignment` bytes,
    a multiple of 8. `path` is written in place: give a temporary one (`files.replacing`).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.format_name,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.n_bytes],
        }
        at += tensor.n_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % alignment)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in tensors.values():
            for block in tensor.blocks():
                file.write(np.ascontiguousarray(block).data)
