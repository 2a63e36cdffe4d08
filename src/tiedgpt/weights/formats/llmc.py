"""llm.c's checkpoints (`gpt2_124M.bin`, `model_*.bin`); they cannot be written.

A checkpoint (karpathy/llm.c, train_gpt2.c and train_gpt2.cu) is 256 little-endian int32. The
first eight are magic, version, max_seq_len, vocab_size, num_layers, num_heads, channels and
padded_vocab_size; then the `parameters`, each for all layers before the next begins. The file has
no names. The tensors get our names and lie, as llm.c stores them, as (out, in). The rows of wte
from vocab_size on are padding and are not read.

llm.c computes GPT-2's architecture only: LayerNorms with epsilon 1e-5, the tanh GELU, biases
everywhere, and one matrix that reads and predicts.
"""

from __future__ import annotations

import math
import struct

from tiedgpt.core.config import GPTConfig
from tiedgpt.files import reading
from tiedgpt.weights.checkpoint import Checkpoint, Claim, Format, GPTCheckpoint
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.gpt import shapes
from tiedgpt.weights.tensors import FLOATS, StoredTensor, tensor_in_file

MAGIC = (20240326).to_bytes(4, "little")
OTHER_MAGICS = tuple(n.to_bytes(4, "little") for n in (20240327, 20240328, 20240520))
"""Magics of llm.c's debug states, tokenizers and token shards, whose names end in .bin, too."""
HEADER = struct.Struct("<256i")
DTYPES = {1: "float32", 3: "float32", 5: "bfloat16"}
"""Version -> dtype. Version 1 has no padding and no padded_vocab_size."""
FIELDS = {
    "max_seq_len": "n_positions",
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "channels": "n_embd",
}
"""The header's names -> ours."""
COMPUTES = {
    "norm": "pre",
    "attention_windows": None,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "bias": True,
    "tie_word_embeddings": True,
}
"""Config fields that llm.c fixes without writing them to its files."""
SIZES = (*FIELDS, "padded_vocab_size")
"""The header after magic and version."""


def detect(file: OpenFile) -> bool:
    """Return whether a file is a checkpoint of llm.c."""
    return file.head.startswith(MAGIC)


def open_llmc(file: OpenFile) -> Checkpoint:
    """Read the header.

    Raises `CorruptInputError` if it is invalid or contradicts the length of the file.
    """
    path, raw = file.path, file.head[: HEADER.size]
    with reading(path, "checkpoint of llm.c"):
        _, version, *rest = HEADER.unpack(raw.ljust(HEADER.size, b"\0"))
        sizes = dict(zip(SIZES, rest, strict=False))
        if version == 1:
            sizes["padded_vocab_size"] = sizes["vocab_size"]
        rows, padded, width = (sizes[n] for n in ("vocab_size", "padded_vocab_size", "channels"))
        is_supported = raw.startswith(MAGIC) and version in DTYPES
        if not is_supported or min(sizes.values()) < 1 or padded < rows:
            raise ValueError(
                f"its header says version {version} with {sizes}; versions 1 and 3 (float32) and 5 "
                "(bfloat16) are read"
            )
        dtype = DTYPES[version]
        layout = (sizes["num_layers"], width, padded, sizes["max_seq_len"])
        expected, n_bytes = HEADER.size + count(*layout) * FLOATS[dtype], file.size
        if expected != n_bytes:
            raise ValueError(f"{expected:,} bytes are described, {n_bytes:,} are there: cut off?")
    tensors: dict[str, StoredTensor] = {}
    at = HEADER.size
    for name, shape in parameters(*layout):
        stored = (rows, width) if name == "wte.weight" else shape
        tensors[name] = tensor_in_file(file, name, stored, dtype, at)
        at += math.prod(shape) * FLOATS[dtype]
    return Checkpoint(
        path,
        "llm.c",
        tensors,
        config=sizes,
        files=(path,),
        claim=Claim(source="the llm.c format has one matrix, wte, that reads and predicts"),
    )


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a checkpoint of llm.c."""
    fields = {name: checkpoint.config[key] for key, name in FIELDS.items()}
    return GPTCheckpoint("llm.c", fields | COMPUTES, dict(checkpoint.tensors))


def parameters(
    n_layer: int, width: int, rows: int, n_positions: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return our name and the shape of each parameter, in the file's order."""
    config = GPTConfig(
        vocab_size=rows, n_positions=n_positions, n_embd=width, n_layer=n_layer, n_head=1
    )
    by_name: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes(config).items():
        in_block = name.split(".", 2)[2] if name.startswith("h.") else name
        by_name.setdefault(in_block, []).append((name, shape))
    return [parameter for layers in by_name.values() for parameter in layers]


def count(n_layer: int, width: int, rows: int, n_positions: int) -> int:
    """Return how many numbers `parameters` describes, without a loop over the layers."""
    return (rows + n_positions + 2 + n_layer * (12 * width + 13)) * width


FORMAT = Format(
    name="llmc",
    title="llm.c",
    about="`.bin`, fp32 and bf16",
    detect=detect,
    open=open_llmc,
    to_gpt=to_gpt,
    suffixes=(".bin",),
    is_model_file=lambda file: not file.head.startswith(OTHER_MAGICS),
)
