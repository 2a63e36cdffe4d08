"""GGUF, llama.cpp's checkpoint format: header -> tensors in the file -> a GPT-2.

Layout (ggml-org/ggml docs/gguf.md, versions 2 and 3, little-endian): "GGUF", version u32, number
of tensors u64, number of metadata pairs u64, the pairs, the tensors' infos, padding, tensor data.
The package gguf reads it too, but takes unbounded memory for hostile files; here every count and
length is compared with the bytes that are left. Only quantized tensors need that package.

Names and metadata of architecture gpt2 as in ggml-org/llama.cpp `src/models/gpt2.cpp`, which
computes GELU in its tanh form and predicts with `output.weight`, or without one with
`token_embd.weight`. Matrices are stored as (out, in), as ours are.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import reading
from tiedgpt.runtime import require_package
from tiedgpt.weights.checkpoint import (
    Checkpoint,
    Claim,
    Format,
    GPTCheckpoint,
    Program,
    TokenizerFile,
    Writer,
)
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.registry import defer
from tiedgpt.weights.tensors import DTYPES, FLOATS, StoredTensor, tensor_in_file

MAGIC = b"GGUF"
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""GGUF's types of values, as `struct` has them."""
STRING, ARRAY = 8, 9
TYPES = {dtype.ggml: name for name, dtype in DTYPES.items() if dtype.ggml is not None}
"""ggml's types that are not quantized."""
MAX_TEXT = 64 << 10
MAX_DIMENSIONS, MAX_ALIGNMENT = 8, 1 << 20

TIE_CLAIM = "tiedgpt.tie_word_embeddings"
"""Our own metadata key, which llama.cpp ignores: whether the model's head is tied."""
LLAMA_CPP_RULE = "the GGUF format: output.weight predicts where it is there, else token_embd.weight"
ARCHITECTURE = "gpt2"
NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "head": "output",
    "h.{}.ln_1": "blk.{}.attn_norm",
    "h.{}.attn.c_attn": "blk.{}.attn_qkv",
    "h.{}.attn.c_proj": "blk.{}.attn_output",
    "h.{}.ln_2": "blk.{}.ffn_norm",
    "h.{}.mlp.c_fc": "blk.{}.ffn_up",
    "h.{}.mlp.c_proj": "blk.{}.ffn_down",
}
"""Our names -> GGUF's, before .weight or .bias."""
_OUR_NAMES = {stored: ours for ours, stored in NAMES.items()}
SIZE_KEYS = {
    "n_positions": "gpt2.context_length",
    "n_embd": "gpt2.embedding_length",
    "n_layer": "gpt2.block_count",
    "n_head": "gpt2.attention.head_count",
    "n_inner": "gpt2.feed_forward_length",
}
EPSILON_KEY = "gpt2.attention.layer_norm_epsilon"
ID_KEYS = {f"{side}_token_id": f"tokenizer.ggml.{side}_token_id" for side in ("bos", "eos")}


def detect(file: OpenFile) -> bool:
    """Whether a file is GGUF."""
    return file.head.startswith(MAGIC)


def open_gguf(file: OpenFile) -> Checkpoint:
    """Read the header of a GGUF file; tensors stay in the file until they are asked for.

    Raises `CorruptInputError` for a file that is damaged, truncated or of another format.
    """
    path = file.path
    metadata, tensors = read_header(file)
    config = {key: value for key, value in metadata.items() if value is not None}
    tied, source = metadata.get(TIE_CLAIM), LLAMA_CPP_RULE
    if tied is not None:
        source = f"the file says {TIE_CLAIM}: {str(tied).lower()}"
        if not isinstance(tied, bool):
            raise CorruptInputError(f"{path}: {TIE_CLAIM} must be true or false, got {tied!r}")
    # Converters of 2023 wrote the matrix of a tied GPT-2 twice: two equal ones claim nothing.
    claim = Claim(tied, source, different_is_untied=tied is None)
    return Checkpoint(path, "GGUF", tensors, config, claim=claim, files=(path,))


def read_header(
    file: OpenFile, arrays: Container[str] = ()
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a GGUF file; raises as `open_gguf`.

    Arrays are lists where `arrays` names them, others None; strings of more than 64 KiB are "".
    """
    with reading(file.path, "GGUF file"), file.map() as data:
        return _parse(file, _Header(data), arrays)


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT-2 in a GGUF file.

    Raises `UserError` for other architectures and for tensor types that cannot be decoded,
    `CorruptInputError` where the metadata contradict each other.
    """
    source, metadata = str(checkpoint.source), checkpoint.config
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(
            f"{source} is a GGUF file of architecture {architecture!r:.40}; tiedgpt runs the GPT "
            f"family, which GGUF calls {ARCHITECTURE!r}"
        )
    tensors = {to_ours(name): stored for name, stored in checkpoint.tensors.items()}
    if len(tensors) < len(checkpoint.tensors):
        raise CorruptInputError(f"{source} holds a parameter twice, under two names")
    quantized = [t.dtype for t in tensors.values() if t.dtype not in FLOATS]
    notes: tuple[str, ...] = ()
    if quantized:
        kinds = ", ".join(sorted(set(quantized)))
        notes = (f"{len(quantized)} quantized matrices ({kinds}) become float32 when loaded",)
    assumed = {"activation_function": "gelu_new", "norm": "pre", "layer_norm_epsilon": 1e-5}
    fields = _fields(source, metadata)
    return GPTCheckpoint("GGUF gpt2", fields, tensors, assumed=assumed, notes=notes)


def to_theirs(name: str) -> str:
    """Return GGUF's name of a parameter of ours."""
    return _renamed(name, NAMES)


def to_ours(name: str) -> str:
    """Return our name of a tensor in a GGUF file; an unknown name stays unchanged."""
    return _renamed(name, _OUR_NAMES)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    module, _, suffix = name.rpartition(".")
    layer = re.search(r"\.(\d+)\.", module)
    template = module.replace(layer[0], ".{}.", 1) if layer else module
    if template not in table or suffix not in ("weight", "bias"):
        return name
    return f"{table[template].format(layer and layer[1])}.{suffix}"


def _fields(source: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata under GPTConfig's names, without the sizes that the weights say."""
    width, heads = (metadata.get(SIZE_KEYS[name]) for name in ("n_embd", "n_head"))
    head_dim = width // heads if type(width) is type(heads) is int and heads else None
    usual = {"head_count_kv": heads, "key_length": head_dim, "value_length": head_dim}
    for key, expected in {**usual, "causal": True}.items():
        value = metadata.get(f"gpt2.attention.{key}", expected)
        if value != expected:
            raise UserError(
                f"{source} says gpt2.attention.{key}={value!r}, which changes the attention and is "
                "not supported"
            )
    keys = {"n_layer": SIZE_KEYS["n_layer"], "n_head": SIZE_KEYS["n_head"], **ID_KEYS}
    keys["layer_norm_epsilon"] = EPSILON_KEY
    fields = {name: metadata[key] for name, key in keys.items() if key in metadata}
    if isinstance(epsilon := fields.get("layer_norm_epsilon"), float):
        fields["layer_norm_epsilon"] = float(f"{epsilon:.7g}")  # of a float32: 1e-05 again
    return fields


class _Header:
    """A position in a file's bytes that cannot move past their end (`ValueError`)."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, n_bytes: int) -> int:
        """Move on by `n_bytes`; return the position before them."""
        if n_bytes > len(self.data) - self.at:
            raise ValueError(f"{n_bytes:,} bytes are claimed at byte {self.at:,}, fewer are left")
        self.at += n_bytes
        return self.at - n_bytes

    def numbers(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{codes}", self.data, self.skip(struct.calcsize(f"<{codes}")))

    def text(self) -> str:
        """Return a string; "" for one of more than 64 KiB."""
        (length,) = self.numbers("Q")
        start = self.skip(length)
        return self.data[start : self.at].decode() if length <= MAX_TEXT else ""

    def pair(self, arrays: Container[str]) -> tuple[str, Any]:
        """Return a key and its number, string, or list; None for an array that is not kept."""
        key, (value_type,), length = self.text(), self.numbers("I"), None
        if value_type == ARRAY:
            value_type, length = self.numbers("IQ")
        if value_type == STRING:
            if length is None:
                return key, self.text()
            if key in arrays:
                return key, [self.text() for _ in range(length)]
            for _ in range(length):
                self.skip(*self.numbers("Q"))
            return key, None
        if value_type not in SCALARS:
            raise ValueError(f"a value has the type {value_type}")
        if length is None:
            return key, self.numbers(SCALARS[value_type])[0]
        if key in arrays:
            return key, list(self.numbers(f"{length}{SCALARS[value_type]}"))
        self.skip(length * struct.calcsize(SCALARS[value_type]))
        return key, None


def _parse(
    file: OpenFile, header: _Header, arrays: Container[str]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    magic, version, n_tensors, n_pairs = header.numbers("4sIQQ")
    if magic != MAGIC or version not in (2, 3):
        raise ValueError(f"it begins with {magic}, version {version}; 2 and 3 are read")
    metadata = dict(header.pair(arrays) for _ in range(n_pairs))
    infos = []
    for _ in range(n_tensors):
        name, (n_dimensions,) = header.text(), header.numbers("I")
        if n_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name[:80]!r} claims {n_dimensions:,} dimensions")
        infos.append((name, header.numbers(f"{n_dimensions}Q")[::-1], *header.numbers("IQ")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-header.at // alignment) * alignment
    tensors = {
        name: _tensor(file, name, shape, qtype, data_start + offset, len(header.data))
        for name, shape, qtype, offset in infos
    }
    if "" in metadata or "" in tensors or (len(metadata), len(tensors)) != (n_pairs, n_tensors):
        raise ValueError("a key or a tensor occurs twice, or its name has more than 64 KiB")
    return metadata, tensors


def _tensor(
    file: OpenFile, name: str, shape: tuple[int, ...], qtype: int, start: int, file_size: int
) -> StoredTensor:
    if qtype in TYPES:
        tensor = tensor_in_file(file, name, shape, TYPES[qtype], start)
    else:
        gguf = require_package("gguf", "reading quantized GGUF tensors")
        if qtype not in list(gguf.GGMLQuantizationType):
            return tensor_in_file(file, name, shape, f"ggml type {qtype}", start)
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        columns = shape[-1] if shape else 1
        if columns % block:
            raise ValueError(f"{name[:80]!r} has rows of {columns:,} in blocks of {block}")
        rows = (math.prod(shape[:-1]), columns // block * block_bytes)
        stored = tensor_in_file(file, name, rows, "uint8", start)
        tensor = replace(
            stored,
            shape=shape,
            dtype=gguf.GGMLQuantizationType(qtype).name,
            read=lambda first, end, low, high: stored.native(first, end),  # whole blocks
        )
    if tensor.storage.stop > file_size:
        raise ValueError(f"{name[:80]!r} of shape {shape} in {tensor.dtype} ends after the file")
    return tensor


WRITER = Writer(
    write=defer("gguf.writer", "write"),
    program=Program(
        "llama.cpp's gpt2", fields=("n_inner", "layer_norm_epsilon", "bias", "tie_word_embeddings")
    ),
    precisions=("fp32", "fp16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    suffix=".gguf",
    holds_tokenizer=True,
    options=(
        "duplicate_head",
        "approximate_gelu",
        "w_precision",
        "chat_template",
        "ollama_template",
        "ollama_system",
        "end_ids",
    ),
)
FORMAT = Format(
    name="gguf",
    title="GGUF",
    about="llama.cpp's files of GPT-2: F32, F16, BF16, and quantized types (Q4_0, Q4_K, Q8_0, ...)",
    about_tokenizer="inside the file",
    detect=detect,
    open=open_gguf,
    to_gpt=to_gpt,
    suffixes=(".gguf",),
    hub_patterns=(("*.gguf",),),
    is_whole_in_one_file=True,
    tokenizer=TokenizerFile(
        read=defer("gguf.vocabulary", "read_tokenizer"),
        detect=detect,
        pattern="*.gguf",
        is_in_weights=True,
    ),
    writer=WRITER,
    packages=("gguf",),
)
