"""The GGUF format (llama.cpp): key-value pairs and tensor infos are read, tensors where they lie.

Layout (ggml-org/ggml docs/gguf.md, versions 2 and 3, little-endian): "GGUF", version u32, number
of tensors u64, number of pairs u64, the pairs, the tensors' infos, padding, data. Every count and
length is checked against the bytes that are left before anything is made of it. No torch.

Arrays (vocabularies, merges) are stepped over; `read_pairs` says where they lie, and
`StoredArray.values` reads one.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import Storage, StoredTensor, byte_reader, plain_reader

MAGIC = b"GGUF"
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
TIE_CLAIM = "tiedgpt.tie_word_embeddings"
"""Our own pair, which llama.cpp ignores: whether two matrices in a file are meant to be two."""
MAX_DIMENSIONS = 8
MAX_TEXT = 64 << 10
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("float32", 1, 4), 1: ("float16", 1, 2), 28: ("float64", 1, 8), 30: ("bfloat16", 1, 2),
    24: ("int8", 1, 1), 25: ("int16", 1, 2), 26: ("int32", 1, 4), 27: ("int64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's types: number -> name, elements a block, bytes a block."""
HEAD_RULE = (
    "the GGUF format: readers predict with output.weight where there is one, else with token_embd"
)


@dataclass(frozen=True)
class StoredArray:
    """An array of the header where it lies; its length was checked against the file's."""

    path: Path
    item_kind: int
    length: int
    start: int
    stop: int

    def values(self) -> list[Any]:
        """Return its numbers or texts; `CorruptInputError` for arrays of arrays and non-UTF-8."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) < self.stop - self.start:
            raise CorruptInputError(f"{self.path} was cut off while it was read")
        if self.item_kind in SCALARS:
            return list(struct.unpack(f"<{self.length}{SCALARS[self.item_kind]}", data))
        if self.item_kind != STRING:
            raise CorruptInputError(f"{self.path}: an array holds arrays, not texts or numbers")
        texts, at = [], 0
        for _ in range(self.length):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            try:
                texts.append(data[at + 8 : end].decode("utf-8"))
            except UnicodeDecodeError:
                raise CorruptInputError(f"{self.path}: text {len(texts)} is not UTF-8") from None
            at = end
        return texts


@dataclass
class _Cursor:
    """A place in a file's bytes that cannot be moved past their end."""

    path: Path
    data: mmap.mmap
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, n_bytes: int) -> int:
        """Return the place and step over `n_bytes`, which must be there."""
        if n_bytes > self.left:
            raise CorruptInputError(
                f"{self.path} is cut off or lies: {n_bytes:,} bytes are claimed at byte "
                f"{self.at:,} and {self.left:,} are left"
            )
        self.at += n_bytes
        return self.at - n_bytes

    def number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.data, self.take(size))[0]

    def text(self) -> str:
        """Return a key or a name."""
        length = self.number("Q")
        if length > MAX_TEXT:
            raise CorruptInputError(f"{self.path}: a name of {length:,} bytes is none")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value_text(self) -> str | None:
        """Return a text; a longer one than any that says something here is stepped over."""
        length = self.number("Q")
        start = self.take(length)
        if length > MAX_TEXT:
            return None
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def skip_text(self) -> None:
        self.take(self.number("Q"))


def open_gguf(path: Path) -> Checkpoint:
    """Read the header of a GGUF file; `CorruptInputError` where it lies or the file is cut off."""
    pairs, tensors = _open(path)
    claim, claim_source = pairs.get(TIE_CLAIM), HEAD_RULE
    if claim is not None:
        if not isinstance(claim, bool):
            raise CorruptInputError(f"{path}: {TIE_CLAIM} is {claim!r}, neither true nor false")
        claim_source = f"the file says {TIE_CLAIM}: {str(claim).lower()}"
    return Checkpoint(
        path, "GGUF", tensors, claim=claim, claim_source=claim_source, files=(path,),
        config={key: value for key, value in pairs.items() if isinstance(value, (str, int, float))},
    )  # fmt: skip


def read_pairs(path: Path) -> dict[str, Any]:
    """Return the key-value pairs of a GGUF file; arrays as `StoredArray`s, not read yet.

    Raises as `open_gguf`.
    """
    return _open(path)[0]


def _open(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(path, data))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, CorruptInputError):
            raise
        raise CorruptInputError(f"{path} is no GGUF file: {error}") from None


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    path = cursor.path
    if cursor.data[cursor.take(4) : 4] != MAGIC:
        raise CorruptInputError(f"{path} is no GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        why = "is big-endian" if version in (2 << 24, 3 << 24) else "is not read here"
        raise CorruptInputError(f"{path}: GGUF version {version} {why}; versions 2 and 3 are read")
    n_tensors, n_pairs = cursor.number("Q"), cursor.number("Q")
    if n_tensors * 24 + n_pairs * 13 > cursor.left:
        raise CorruptInputError(
            f"{path} lies: {n_tensors:,} tensors and {n_pairs:,} pairs do not fit {cursor.left:,} "
            "bytes"
        )
    pairs: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = cursor.text()
        if key in pairs:
            raise CorruptInputError(f"{path}: the key {key[:80]!r} stands twice")
        pairs[key] = _value(cursor, cursor.number("I"))
    infos = [_info(cursor) for _ in range(n_tensors)]
    alignment = pairs.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise CorruptInputError(f"{path}: general.alignment={alignment!r} is no alignment")
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, type_number, offset in infos:
        if name in tensors:
            raise CorruptInputError(f"{path} names the tensor {name[:80]!r} twice")
        start = data_start + offset
        tensors[name] = _tensor(path, name, shape, type_number, start, len(cursor.data))
    return pairs, tensors


def _value(cursor: _Cursor, kind: int, depth: int = 0) -> Any:
    """Return a scalar, a text (None where it is too long to say something), or an array's place."""
    if kind == STRING:
        return cursor.value_text()
    if kind in SCALARS:
        return cursor.number(SCALARS[kind])
    if kind != ARRAY or depth > 8:
        raise CorruptInputError(f"{cursor.path}: a value has the unknown type {kind}")
    item_kind, length = cursor.number("I"), cursor.number("Q")
    start = cursor.at
    if item_kind in SCALARS:
        cursor.take(length * struct.calcsize("<" + SCALARS[item_kind]))
        return StoredArray(cursor.path, item_kind, length, start, cursor.at)
    if length * 8 > cursor.left:
        raise CorruptInputError(f"{cursor.path} lies: an array of {length:,} values does not fit")
    for _ in range(length):
        if item_kind == STRING:
            cursor.skip_text()
        else:
            _value(cursor, item_kind, depth + 1)
    return StoredArray(cursor.path, item_kind, length, start, cursor.at)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    n_dimensions = cursor.number("I")
    if n_dimensions > MAX_DIMENSIONS:
        raise CorruptInputError(f"{cursor.path}: {name[:80]!r} claims {n_dimensions:,} dimensions")
    sizes = [cursor.number("Q") for _ in range(n_dimensions)]
    return name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], type_number: int, start: int, file_size: int
) -> StoredTensor:
    if type_number not in TYPES:
        storage = Storage(str(path), start, start)
        return StoredTensor(name, shape, f"ggml type {type_number}", 0, storage, None)
    dtype, block, block_bytes = TYPES[type_number]
    columns = shape[-1] if shape else 1
    if columns % block:
        raise CorruptInputError(
            f"{path}: {name[:80]!r} has rows of {columns:,}, no multiple of {dtype}'s {block}"
        )
    size = math.prod(shape) // block * block_bytes
    if start + size > file_size:
        raise CorruptInputError(
            f"{path} is cut off or lies: {name[:80]!r} of shape {shape} in {dtype} would end at "
            f"byte {start + size:,} of {file_size:,}"
        )
    if block == 1:
        read = plain_reader(path, start, columns, block_bytes)
    else:
        read = byte_reader(path, start, columns // block * block_bytes)
    return StoredTensor(name, shape, dtype, size, Storage(str(path), start, start + size), read)
