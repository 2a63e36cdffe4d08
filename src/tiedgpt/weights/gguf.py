"""GGUF, llama.cpp's checkpoint format: header -> tensors in the file -> a GPT-2.

Layout (ggml-org/ggml docs/gguf.md, versions 2 and 3, little-endian): "GGUF", version u32, number
of tensors u64, number of metadata pairs u64, the pairs, the tensors' infos, padding, tensor data.
Every count and length is compared with the bytes that are left before memory is taken for it.

Tensor names and metadata of architecture gpt2 as in ggml-org/llama.cpp `src/models/gpt2.cpp`, which
computes GELU in its tanh form and predicts with `output.weight`, or without one with
`token_embd.weight`. Matrices are stored as (out, in), as ours are.

Only quantized tensors need the package gguf, which decodes them.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.tensors import (
    FLOATS,
    Storage,
    StoredTensor,
    byte_reader,
    plain_reader,
    printable,
)

if TYPE_CHECKING:
    from tiedgpt.text.tokenizer import Tokenizer

FORMAT = "GGUF"
MAGIC = b"GGUF"
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""GGUF's types of values, as `struct` has them."""
STRING, ARRAY = 8, 9
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
"""ggml's tensor types: number -> dtype, elements per block, bytes per block."""
MAX_TEXT = 64 << 10
MAX_DIMENSIONS = 8
MAX_DEPTH = 8
"""Of arrays within arrays."""

TIE_CLAIM = "tiedgpt.tie_word_embeddings"
"""Our own metadata key, which llama.cpp ignores: whether the model's head is tied."""
HEAD_RULE = (
    "the GGUF format: readers predict with output.weight where there is one, else with token_embd"
)
ARCHITECTURE = "gpt2"
TOP_NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "head": "output"}
BLOCK_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Our names -> GGUF's, before .weight or .bias; those of blocks follow h.N. and blk.N."""
SIZE_KEYS = {
    "n_positions": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_inner": "feed_forward_length",
}
EPSILON_KEY = "attention.layer_norm_epsilon"
ID_KEYS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}
_OUR_TOP_NAMES = {theirs: ours for ours, theirs in TOP_NAMES.items()}
_OUR_BLOCK_NAMES = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}


def detect(path: Path, head: bytes) -> bool:
    """Whether a file that begins with `head` is GGUF."""
    return head.startswith(MAGIC) or path.suffix == ".gguf"


def read(path: Path) -> Checkpoint:
    """Read the header of a GGUF file; tensors stay in the file until they are asked for.

    Raises `CorruptInputError` for a file that is damaged, truncated or of another format.
    """
    metadata, tensors = _open(path, ())
    claim, claim_source = metadata.get(TIE_CLAIM), HEAD_RULE
    if claim is not None:
        if not isinstance(claim, bool):
            raise CorruptInputError(f"{path}: {TIE_CLAIM} must be true or false, got {claim!r}")
        claim_source = f"the file says {TIE_CLAIM}: {str(claim).lower()}"
    config = {key: value for key, value in metadata.items() if value is not None}
    return Checkpoint(
        path, FORMAT, tensors, config, claim=claim, claim_source=claim_source, files=(path,)
    )


def read_metadata(path: Path, arrays: Container[str]) -> dict[str, Any]:
    """Return the metadata of a GGUF file: numbers, short strings, and the named arrays as lists.

    Other arrays and strings of more than 64 KiB are None. Raises as `read`.
    """
    return _open(path, arrays)[0]


def tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer inside a GGUF file.

    Raises `UserError` where there is none or it is of another kind, `CorruptInputError` where it
    is damaged.
    """
    from tiedgpt.weights.gguf_tokenizer import read_tokenizer

    return read_tokenizer(path)


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT-2 in a GGUF file.

    Raises `UserError` for other architectures and for tensor types that cannot be decoded,
    `CorruptInputError` where the metadata contradict each other.
    """
    source, metadata = str(checkpoint.source), checkpoint.config
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        named = printable(str(architecture)[:40])
        raise UserError(
            f"{source} is a GGUF file of architecture {named!r}; tiedgpt runs the GPT family, "
            f"which GGUF calls {ARCHITECTURE!r}"
        )
    fields = _fields(source, metadata)
    tensors: dict[str, LazyTensor] = {}
    for their_name, stored in checkpoint.tensors.items():
        name = to_ours(their_name)
        if name in tensors:
            raise CorruptInputError(f"{source} holds {printable(name)} twice, under two names")
        if not stored.is_decodable:
            raise UserError(
                f"{source}: {printable(their_name)} is {stored.dtype}, which cannot be decoded: "
                "convert it first with llama.cpp's "
                "`llama-quantize --allow-requantize FILE NEW_FILE F16`"
            )
        tensors[name] = LazyTensor(stored)
    quantized = [t.stored.dtype for t in tensors.values() if t.stored.dtype not in FLOATS]
    notes: tuple[str, ...] = ()
    if quantized:
        require_package("gguf", f"reading quantized GGUF tensors ({quantized[0]})")
        kinds = ", ".join(sorted(set(quantized)))
        notes = (f"{len(quantized)} quantized matrices ({kinds}) become float32 when loaded",)
    assumed = {"activation_function": "gelu_new", "norm": "pre", "layer_norm_epsilon": 1e-5}
    return GPTCheckpoint("GGUF gpt2", fields, tensors, assumed=assumed, notes=notes)


def to_theirs(name: str) -> str:
    """Return GGUF's name of a parameter of ours."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"h\.(\d+)\.(.+)", module):
        return f"blk.{match[1]}.{BLOCK_NAMES[match[2]]}.{kind}"
    return f"{TOP_NAMES[module]}.{kind}"


def to_ours(name: str) -> str:
    """Return our name of a tensor in a GGUF file; an unknown name stays as it is."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return name
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        inner = _OUR_BLOCK_NAMES.get(match[2])
        return name if inner is None else f"h.{match[1]}.{inner}.{kind}"
    return f"{_OUR_TOP_NAMES[module]}.{kind}" if module in _OUR_TOP_NAMES else name


def _fields(source: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata under GPTConfig's names."""
    fields: dict[str, Any] = {}
    for name, key in SIZE_KEYS.items():
        value = metadata.get(f"{ARCHITECTURE}.{key}")
        if value is not None:
            if type(value) is not int or value < 1:
                raise CorruptInputError(
                    f"{source}: {ARCHITECTURE}.{key} must be a positive integer, got {value!r}"
                )
            fields[name] = value
    if fields.get("n_inner") == 4 * fields.get("n_embd", 0):
        del fields["n_inner"]
    epsilon = metadata.get(f"{ARCHITECTURE}.{EPSILON_KEY}")
    if epsilon is not None:
        fields["layer_norm_epsilon"] = _shortest_decimal(epsilon)
    for name, key in ID_KEYS.items():
        if type(metadata.get(key)) is int:
            fields[name] = metadata[key]
    if isinstance(metadata.get(TIE_CLAIM), bool):
        fields["tie_word_embeddings"] = metadata[TIE_CLAIM]
    _refuse_other_attention(source, metadata, fields)
    return fields


def _refuse_other_attention(
    source: str, metadata: Mapping[str, Any], fields: Mapping[str, Any]
) -> None:
    heads = fields.get("n_head")
    head_dim = fields["n_embd"] // heads if heads and "n_embd" in fields else None
    plain = {
        "attention.head_count_kv": heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.causal": True,
    }
    for key, expected in plain.items():
        value = metadata.get(f"{ARCHITECTURE}.{key}", expected)
        if value != expected:
            raise UserError(
                f"{source} says {ARCHITECTURE}.{key}={value!r}, which changes the attention and "
                "is not supported"
            )


def _shortest_decimal(value: Any) -> Any:
    """Return the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float) and float(single := np.float32(value)) == value:
        return float(str(single))
    return value


class _Header:
    """A position in a file's bytes that cannot move past their end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return len(self.data) - self.at

    def skip(self, n_bytes: int) -> int:
        """Move on by `n_bytes`, which must be there; return the position before them."""
        if n_bytes > self.left:
            raise CorruptInputError(
                f"{self.path} is truncated or damaged: {n_bytes:,} bytes are claimed at byte "
                f"{self.at:,}, {self.left:,} are left"
            )
        self.at += n_bytes
        return self.at - n_bytes

    def number(self, code: str) -> Any:
        start = self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def text(self) -> str | None:
        """Return a string; None for one of more than 64 KiB or that is not UTF-8."""
        length = self.number("Q")
        start = self.skip(length)
        if length > MAX_TEXT:
            return None
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            return None

    def name(self) -> str:
        """Return a key or a tensor's name."""
        name = self.text()
        if name is None:
            raise CorruptInputError(
                f"{self.path}: the name that ends at byte {self.at:,} is not UTF-8 of at most "
                f"{MAX_TEXT:,} bytes"
            )
        return name

    def value(self, kind: int, *, keep_arrays: bool = False, depth: int = 0) -> Any:
        """Return a number, a string, or an array as a list; None for an array that is not kept."""
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY or depth > MAX_DEPTH:
            raise CorruptInputError(f"{self.path}: a value has the unknown type {kind}")
        kind, length = self.number("I"), self.number("Q")
        if kind in SCALARS:
            layout = f"<{length}{SCALARS[kind]}"
            start = self.skip(length * struct.calcsize("<" + SCALARS[kind]))
            return list(struct.unpack_from(layout, self.data, start)) if keep_arrays else None
        if length * 8 > self.left:
            raise CorruptInputError(
                f"{self.path} is damaged: an array of {length:,} values does not fit"
            )
        if keep_arrays:
            return [self.value(kind, keep_arrays=True, depth=depth + 1) for _ in range(length)]
        for _ in range(length):
            if kind == STRING:
                self.skip(self.number("Q"))
            else:
                self.value(kind, depth=depth + 1)
        return None


def _open(path: Path, arrays: Container[str]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and the tensors; of arrays only those whose keys are in `arrays`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Header(path, data), arrays)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, CorruptInputError):
            raise
        raise CorruptInputError(f"{path} is no GGUF file: {error}") from None


def _parse(
    header: _Header, arrays: Container[str]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    path = header.path
    if header.data[header.skip(4) : 4] != MAGIC:
        raise CorruptInputError(f"{path} is no GGUF file: it does not begin with GGUF")
    version = header.number("I")
    if version not in (2, 3):
        why = "is big-endian" if version in (2 << 24, 3 << 24) else "is not supported"
        raise CorruptInputError(f"{path}: GGUF version {version} {why}; versions 2 and 3 are read")
    n_tensors, n_pairs = header.number("Q"), header.number("Q")
    if n_tensors * 24 + n_pairs * 13 > header.left:
        raise CorruptInputError(
            f"{path} is damaged: {n_tensors:,} tensors and {n_pairs:,} pairs do not fit in "
            f"{header.left:,} bytes"
        )
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = header.name()
        if key in metadata:
            raise CorruptInputError(f"{path}: the key {key[:80]!r} occurs twice")
        metadata[key] = header.value(header.number("I"), keep_arrays=key in arrays)
    infos = [_info(header) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise CorruptInputError(
            f"{path}: general.alignment must be from 1 to 1,048,576, got {alignment!r}"
        )
    data_start = -(-header.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, type_number, offset in infos:
        if name in tensors:
            raise CorruptInputError(f"{path}: the tensor {name[:80]!r} occurs twice")
        start = data_start + offset
        tensors[name] = _tensor(path, name, shape, type_number, start, len(header.data))
    return metadata, tensors


def _info(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, shape, type and offset."""
    name = header.name()
    n_dimensions = header.number("I")
    if n_dimensions > MAX_DIMENSIONS:
        raise CorruptInputError(f"{header.path}: {name[:80]!r} claims {n_dimensions:,} dimensions")
    sizes = [header.number("Q") for _ in range(n_dimensions)]
    return name, tuple(reversed(sizes)), header.number("I"), header.number("Q")


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
            f"{path}: {name[:80]!r} has rows of {columns:,}, not a multiple of {dtype}'s {block}"
        )
    size = math.prod(shape) // block * block_bytes
    if start + size > file_size:
        raise CorruptInputError(
            f"{path} is truncated or damaged: {name[:80]!r} of shape {shape} in {dtype} would end "
            f"at byte {start + size:,} of {file_size:,}"
        )
    if block == 1:
        reader = plain_reader(path, start, columns, block_bytes)
    else:
        reader = byte_reader(path, start, columns // block * block_bytes)
    return StoredTensor(name, shape, dtype, size, Storage(str(path), start, start + size), reader)
