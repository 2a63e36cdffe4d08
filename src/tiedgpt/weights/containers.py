"""Open containers of named tensors that several formats share: safetensors, torch.save, indexes.

`Format.detect_checkpoint` selects the format by names and shapes, or by a config.json next to it.

Layout of safetensors (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON
header of `name: {dtype, shape, data_offsets}`, then the tensors' bytes without holes. The library
checks a header; tensors are read by place and written one by one, since its numpy reader has no
bfloat16. Reading a header needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json, reading
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.tensors import DTYPES, StoredTensor, tensor_in_file
from tiedgpt.weights.wrappers import without_wrappers

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
INDEX = ".index.json"
BEGINS = re.compile(rb".{4}\0{4}\{|\x80[\x02-\x05]", re.DOTALL)
"""The first bytes of safetensors (as `is_safetensors`) and of a pickle."""
MAX_HEADER = 32 << 20
"""Bytes; GPT-3 of 175 billion parameters has a header of 120,000."""
TORCH_NAMES = {dtype.safetensors: name for name, dtype in DTYPES.items()}


def detect(file: OpenFile) -> bool:
    """Whether a file begins as safetensors or a pickle, is torch's zip, or is an index of shards.

    A zip file whose members cannot be read is taken for a damaged one of torch's.
    """
    if file.head.startswith(b"PK"):
        return not file.members or any(name.endswith("data.pkl") for name in file.members)
    return bool(BEGINS.match(file.head)) or file.path.name.endswith(INDEX)


def open_container(file: OpenFile) -> Checkpoint:
    """Return all tensors of a file, or of the shards that an index lists; only headers are read."""
    is_index = file.path.name.endswith(INDEX)
    return without_wrappers(_open_index(file) if is_index else _open_file(file))


def _open_file(file: OpenFile) -> Checkpoint:
    """Open a file of tensors under the names in it."""
    if file.path.suffix != ".safetensors" and not is_safetensors(file.head):
        from tiedgpt.weights.torch_file import read_torch_file

        return read_torch_file(file)
    tensors, _ = read_safetensors(file)
    return Checkpoint(file.path, "safetensors", tensors, files=(file.path,))


def _open_index(index: OpenFile) -> Checkpoint:
    """Open the shards of an index; they are next to it."""
    path = index.path
    weight_map = read_json(path, lambda path: index.stream().read()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInputError(f"{path} has no weight_map")
    tensors: dict[str, StoredTensor] = {}
    files, container = [path], ""
    for shard in sorted(set(map(str, weight_map.values()))):
        if shard.endswith(INDEX):
            raise CorruptInputError(f"{path} names an index as a shard: {shard[:80]!r}")
        file = beside(path, shard, links=True)
        opened = _open_file(OpenFile(file))
        if twice := tensors.keys() & opened.tensors.keys():
            raise CorruptInputError(f"{path}: two shards hold {min(twice)!r}")
        tensors |= opened.tensors
        files, container = [*files, file], opened.container
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise CorruptInputError(f"{path} promises {missing[0]!r}, and no shard holds it")
    return Checkpoint(path, container, tensors, files=tuple(files))


def is_safetensors(head: bytes) -> bool:
    """Whether a file begins with a header's length, below 4 GB, and a JSON object."""
    return head[4:9] == b"\0\0\0\0{"


def read_safetensors(file: OpenFile) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and the metadata that the header of a file states.

    Raises `CorruptInputError` if the header is wrong or contradicts the file's size.
    """
    with reading(file.path, "safetensors file"):
        length = int.from_bytes(file.head[:8], "little")
        if length > MAX_HEADER:
            raise ValueError(f"a header of {length:,} bytes")
        with safe_open(file.path, framework="numpy"):  # types, sizes, offsets, the file's size
            is_long = 8 + length > len(file.head)
            first = file.stream().read(8 + length) if is_long else file.head[: 8 + length]
            header = json.loads(first[8:])
    metadata = header.pop("__metadata__", None) or {}
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        dtype = TORCH_NAMES.get(entry["dtype"], entry["dtype"].lower())
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = tensor_in_file(file, name, tuple(entry["shape"]), dtype, start, end - start)
    return tensors, metadata


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
) -> None:
    """Write tensors in the given order, and tensors of other files byte for byte.

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
        if tensor.dtype not in DTYPES:
            raise UserError(f"a tensor is {tensor.dtype}, which is not written to safetensors here")
        dtype = DTYPES[tensor.dtype].safetensors
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % alignment)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            for block in tensor.blocks():
                file.write(np.ascontiguousarray(block).data)
