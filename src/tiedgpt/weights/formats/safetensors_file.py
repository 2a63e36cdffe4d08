"""The safetensors format: a checked header, tensors read one at a time, written as a stream.

Layout (huggingface/safetensors README): 8 bytes little-endian header length, a JSON header of
`name: {dtype, shape, data_offsets}`, then the tensors' bytes, without holes. The header is checked
against the file's size before memory is taken for anything. Reading the header needs no torch.
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


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file: its type, its shape, its first byte and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header was read and found consistent with the file's size."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header; `CorruptInputError` where it lies or the file is cut off."""
        try:
            with path.open("rb") as file:
                file_size = path.stat().st_size
                head = file.read(8)
                if len(head) < 8:
                    raise CorruptInputError(f"{path} is too short to be safetensors")
                (length,) = struct.unpack("<Q", head)
                if length > MAX_HEADER or 8 + length > file_size:
                    raise CorruptInputError(
                        f"{path} is not safetensors, or is cut off: its header claims {length:,} "
                        f"bytes of a file of {file_size:,}"
                    )
                raw = file.read(length)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        brackets = raw.count(b"{") + raw.count(b"[")
        if brackets > 3 * MAX_TENSORS + 2 or raw.count(b",") > 16 * MAX_TENSORS:
            raise CorruptInputError(f"{path}: its header claims more than {MAX_TENSORS:,} tensors")
        try:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise CorruptInputError(f"{path}: its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise CorruptInputError(f"{path}: its header is not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise CorruptInputError(f"{path}: its metadata is not an object")
        entries = {
            name: _entry(path, name, value, data_start=8 + length) for name, value in header.items()
        }
        _check_cover(path, entries, 8 + length, file_size)
        return cls(path, entries, metadata)

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        import torch

        entry = self.entries[name]
        if entry.dtype not in TORCH_NAMES:
            raise UserError(f"{self.path}: {name} is {entry.dtype}, which is not read here")
        dtype = getattr(torch, TORCH_NAMES[entry.dtype])
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=dtype)
        buffer = bytearray(entry.size)
        with self.path.open("rb") as file:
            file.seek(entry.start)
            if file.readinto(buffer) != entry.size:
                raise CorruptInputError(f"{self.path} was cut off while it was read")
        return torch.frombuffer(buffer, dtype=dtype).view(entry.shape)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a header that names a tensor twice."""
    if len(pairs) != len({name for name, _ in pairs}):
        raise ValueError("a name stands twice")
    return dict(pairs)


def _entry(path: Path, name: str, value: Any, *, data_start: int) -> Entry:
    def whole(number: object) -> bool:
        return type(number) is int and 0 <= number < 2**63

    try:
        name.encode()
    except UnicodeEncodeError:
        raise CorruptInputError(f"{path}: the name {name[:80]!r} is no text") from None
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        sound = (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and len(shape) <= 64
            and all(map(whole, shape))
            and whole(start)
            and whole(end)
        )
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


def _check_cover(path: Path, entries: dict[str, Entry], data_start: int, file_size: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != at:
            raise CorruptInputError(f"{path}: {name!r} overlaps another tensor or leaves a hole")
        at += entry.size
    if at != file_size:
        raise CorruptInputError(
            f"{path} is {'cut off' if file_size < at else 'too long'}: its header describes "
            f"{at:,} bytes, the file has {file_size:,}"
        )


class Writable(Protocol):
    """What can be written: it knows its bytes beforehand and gives them in blocks."""

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
        return safetensors_name(self.written_as or self.tensor.dtype)

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

    The first begins at a multiple of `alignment` bytes, a multiple of 8.

    `path` is written in place: give a temporary one (`files.replacing`).
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


def safetensors_name(torch_dtype: dtype) -> str:
    """Return the format's name of a torch dtype."""
    bare = str(torch_dtype).removeprefix("torch.")
    for name, torch_name in TORCH_NAMES.items():
        if torch_name == bare:
            return name
    raise UserError(f"tensors of {torch_dtype} are not written to safetensors here")
