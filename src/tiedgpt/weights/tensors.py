"""Stored tensors: names, shapes and places, and rows in blocks.

Every format's reader makes `StoredTensor`s; whoever compares, counts or copies them need not know
the format. Bytes are read as unsigned integers of the item's width ("native") and are decoded to
floats on request, so that copying is exact and numpy needs no bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import UserError
from tiedgpt.runtime import require_package
from tiedgpt.weights.file import OpenFile

if TYPE_CHECKING:
    from torch import Tensor

Native = NDArray[Any]
Read = Callable[[int, int, int, int], Native]
"""(first row, end row, first column, end column) -> that block in native integers."""


class Dtype(NamedTuple):
    """Element type of a tensor: its size, and its name or number in other formats."""

    n_bytes: int
    safetensors: str
    ggml: int | None = None


DTYPES = {
    "float64": Dtype(8, "F64", 28), "float32": Dtype(4, "F32", 0), "float16": Dtype(2, "F16", 1),
    "bfloat16": Dtype(2, "BF16", 30), "int64": Dtype(8, "I64", 27), "int32": Dtype(4, "I32", 26),
    "int16": Dtype(2, "I16", 25), "int8": Dtype(1, "I8", 24), "uint64": Dtype(8, "U64"),
    "uint32": Dtype(4, "U32"), "uint16": Dtype(2, "U16"), "uint8": Dtype(1, "U8"),
    "bool": Dtype(1, "BOOL"), "complex64": Dtype(8, "C64"), "float8_e4m3fn": Dtype(1, "F8_E4M3"),
    "float8_e5m2": Dtype(1, "F8_E5M2"), "float8_e8m0fnu": Dtype(1, "F8_E8M0"),
    "float8_e4m3fnuz": Dtype(1, "F8_E4M3FNUZ"), "float8_e5m2fnuz": Dtype(1, "F8_E5M2FNUZ"),
}  # fmt: skip
"""Element types by torch's name."""
FLOATS = {name: DTYPES[name].n_bytes for name in ("float64", "float32", "float16", "bfloat16")}
BLOCK_BYTES = 8 << 20
PANEL_TYPES = ("fp32 panels", "bf16 panels", "int8 panels", "int4 panels")
"""Matrices packed for CPU kernels (`formats/packed/panels.py`); their readers give float32."""
QUANTIZED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0",
    "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
"""ggml's types that the package gguf decodes; their readers give rows of bytes."""
DECODABLE = frozenset((*FLOATS, *PANEL_TYPES, *QUANTIZED))


@dataclass(frozen=True)
class Storage:
    """Bytes [start, stop) of a place: a file, or an allocation in memory."""

    place: Hashable
    start: int
    stop: int

    def overlaps(self, other: Storage) -> bool:
        """Whether the two have a byte in common."""
        return self.place == other.place and max(self.start, other.start) < min(
            self.stop, other.stop
        )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's name, shape, type, size in bytes, where its bytes lie, and how to read them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    storage: Storage
    read: Read | None
    """None where the bytes cannot be read (a tensor on the meta device)."""
    trainable: bool = True
    owner: int | None = None
    """In memory, the id of the parameter: two parameters can lie on the same bytes."""
    strides: tuple[int, ...] | None = None
    """Elements from one index to the next of each axis; None if stored row by row."""

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape as rows of the last axis."""
        return (math.prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    def is_view_of(self, other: StoredTensor) -> bool:
        """Whether both cover the same numbers, in the same layout or one transposed."""
        if self.storage != other.storage or self.dtype != other.dtype:
            return False
        steps, others = self._steps(), other._steps()
        return steps == others or (self.shape != other.shape and steps == others[::-1])

    def _steps(self) -> list[tuple[int, int]]:
        """Return (size, stride) of each axis."""
        strides = self.strides or [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        return [(n, step if n > 1 else 0) for n, step in zip(self.shape, strides, strict=True)]

    def transpose(self) -> StoredTensor:
        """Return the transpose of a matrix without reading it, or any other tensor unchanged."""
        if len(self.shape) != 2:
            return self
        rows, columns = self.shape

        def read(first: int, end: int, low: int, high: int) -> Native:
            return self.native(low, high, first, end).T

        return replace(
            self,
            shape=(columns, rows),
            strides=(self.strides or (columns, 1))[::-1],
            read=None if self.read is None or self.dtype in QUANTIZED else read,
        )

    def scale_columns(self, n: int, factor: float) -> StoredTensor:
        """Return the tensor with its first `n` columns multiplied, in its own type.

        A tensor of another type than `FLOATS` is returned unchanged: its reader refuses it.
        """
        if self.read is None or self.dtype not in FLOATS:
            return self

        def read(first: int, end: int, low: int, high: int) -> Native:
            import torch

            block = torch.from_numpy(np.array(self.native(first, end, low, high)))
            block.view(getattr(torch, self.dtype))[:, : max(0, n - low)] *= factor
            return block.numpy()

        scaled_storage = replace(self.storage, place=(self.storage.place, n, factor))
        return replace(self, read=read, storage=scaled_storage)

    def first_rows(self, n: int) -> StoredTensor:
        """Return the first `n` rows of a matrix as a tensor."""
        n_bytes = n * self.n_bytes // max(1, self.shape[0])
        storage = replace(self.storage, stop=self.storage.start + n_bytes)
        return replace(self, shape=(n, self.shape[1]), n_bytes=n_bytes, storage=storage)

    @property
    def is_decodable(self) -> bool:
        """Whether its elements can be read as numbers, not only as bytes."""
        return self.read is not None and self.dtype in DECODABLE

    def rows(self, start: int, stop: int) -> NDArray[np.floating[Any]]:
        """Return rows [start, stop) as float32 (float64 where the tensor is float64)."""
        return decode(np.ascontiguousarray(self.native(start, stop)), self.dtype)

    def tensor(self) -> Tensor:
        """Return a copy in memory; quantized and packed types become float32."""
        import torch

        native, dtype = self.native(0, self.matrix_shape[0]), self.dtype
        if dtype in (*PANEL_TYPES, *QUANTIZED):
            native, dtype = decode(native, dtype), "float32"
        owned = native if native.flags.writeable else native.copy()
        tensor = torch.from_numpy(owned).view(getattr(torch, dtype))
        is_owner = native.flags.owndata or owned is not native or not tensor.is_contiguous()
        return (tensor.contiguous() if is_owner else tensor.clone()).view(self.shape)

    def decoding_error(self) -> UserError:
        """Return the error of loading a tensor that is not decodable."""
        return UserError(
            f"{printable(self.name)} is {self.dtype}, which is not read as a model's weights; "
            f"{', '.join(FLOATS)} and GGUF's quantized types are"
        )

    def native(self, start: int, stop: int, low: int = 0, high: int | None = None) -> Native:
        """Return a block as the unsigned integers (or quantized bytes) that are stored."""
        if self.read is None:
            raise UserError(f"{self.name} has no data to read (it lies on the meta device)")
        return self.read(start, stop, low, self.matrix_shape[1] if high is None else high)

    def blocks(self) -> Iterator[Native]:
        """Yield the stored rows, a few megabytes at a time."""
        rows = self.matrix_shape[0]
        step = max(1, BLOCK_BYTES * rows // max(1, self.n_bytes))
        for start in range(0, rows, step):
            yield self.native(start, min(rows, start + step))


def printable(name: str) -> str:
    """Return a name from a file with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def decode(native: Native, dtype: str) -> NDArray[np.floating[Any]]:
    """Return stored integers as the floats that they stand for."""
    if dtype in QUANTIZED:
        gguf = require_package("gguf", f"decoding {dtype}")
        with np.errstate(all="ignore"):
            return gguf.quants.dequantize(native, gguf.GGMLQuantizationType[dtype])
    if dtype == "bfloat16":
        return (native.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return native.view("<f2").astype(np.float32)
    return native.view("<f4" if dtype in PANEL_TYPES else f"<f{FLOATS[dtype]}")


def tensor_in_file(
    file: OpenFile,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    start: int,
    n_bytes: int | None = None,
) -> StoredTensor:
    """Return a row-major tensor of `n_bytes` that begins at byte `start`.

    The tensor has no reader for a type outside `DTYPES`, or for several elements in a byte. Its
    reader raises `CorruptInputError` for a file that is too short.
    """
    width, columns = DTYPES[dtype].n_bytes if dtype in DTYPES else 0, shape[-1] if shape else 1
    size = math.prod(shape) * width
    n_bytes = size if n_bytes is None else n_bytes

    storage = Storage(str(file.path), start, start + n_bytes)
    read = partial(file.read_block, start, width, columns)
    is_readable = width and n_bytes == size
    return StoredTensor(name, shape, dtype, n_bytes, storage, read if is_readable else None)


def by_storage(tensors: Iterable[StoredTensor]) -> list[list[StoredTensor]]:
    """Group tensors that have bytes in common, in the order of each group's first tensor."""
    order = list(tensors)
    lies = [tensor.storage for tensor in order]
    groups: list[list[int]] = []
    span = Storage(None, 0, 0)
    for i in sorted(range(len(order)), key=lambda i: (str(lies[i].place), lies[i].start)):
        if lies[i].overlaps(span):
            groups[-1].append(i)
            span = replace(span, stop=max(span.stop, lies[i].stop))
        else:
            groups.append([i])
            span = lies[i]
    return [[order[i] for i in group] for group in sorted(map(sorted, groups))]
