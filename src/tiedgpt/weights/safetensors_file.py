"""The safetensors format: the library checks a header, tensors are read and written one by one.

Layout (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON header of
`name: {dtype, shape, data_offsets}`, then the tensors' bytes without holes. Tensors are read by
place, since the library's numpy reader has no bfloat16. Reading a header needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.tensors import Storage, StoredTensor, file_reader

if TYPE_CHECKING:
    from torch import Tensor

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


def is_safetensors(head: bytes) -> bool:
    """Whether a file begins with a header's length, below 4 GB, and a JSON object."""
    return head[4:9] == b"\0\0\0\0{"


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header was read and agrees with the file's size."""

    path: Path
    entries: Mapping[str, StoredTensor]
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
        entries: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            bits = re.search(r"\d+", dtype)
            width = int(bits[0]) // 8 if bits else 1
            reader = file_reader(path, start, shape[-1] if shape else 1, width) if width else None
            entries[name] = StoredTensor(
                name, shape, TORCH_NAMES.get(dtype, dtype.lower()), end - start,
                Storage(str(path), start, end), reader,
            )  # fmt: skip
        return cls(path, entries, metadata)

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        return self.entries[name].tensor()


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
) -> None:
    """Write tensors in the order given, those of other files exactly as they are stored there.

    Besides them, a block of bytes is in memory at a time. The `safetensors` library takes every
    tensor as bytes before it writes the first, which doubles the memory of a model whose matrices
    are transposed or rounded, and cannot copy from another file. The first tensor begins at a
    multiple of `alignment` bytes, a multiple of 8. `path` is written in place: give a temporary one
    (`files.replacing`).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.n_bytes
        if tensor.dtype not in NAMES:
            raise UserError(f"a tensor is {tensor.dtype}, which is not written to safetensors here")
        dtype, shape = NAMES[tensor.dtype], tensor.shape
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % alignment)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            for block in tensor.blocks():
                file.write(np.ascontiguousarray(block).data)
