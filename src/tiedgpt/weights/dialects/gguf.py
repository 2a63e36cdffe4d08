"""GGUF files of architecture gpt2: llama.cpp's names and pairs -> ours.

Names and pairs as in ggml-org/llama.cpp `src/models/gpt2.cpp`, which computes GELU in its tanh
form, scales scores by 1/sqrt(D/H) and predicts with `output.weight`, or where there is none with
`token_embd.weight`. Matrices lie as (out, in), as ours do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.formats.gguf_file import TIE_CLAIM
from tiedgpt.weights.tensors import printable

ARCHITECTURE = "gpt2"
TOP_NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "head": "output",
}
BLOCK_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Ours -> theirs, before .weight or .bias; those of blocks after h.N. and blk.N."""
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
_OURS = {theirs: ours for ours, theirs in TOP_NAMES.items()}
_OURS_IN_BLOCK = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a GGUF file.

    Raises `UserError` for other architectures and for types of weights that are not read,
    `CorruptInputError` where the pairs contradict each other.
    """
    source, pairs = checkpoint.source, checkpoint.config
    architecture = pairs.get("general.architecture")
    if architecture != ARCHITECTURE:
        named = printable(str(architecture)[:40])
        raise UserError(
            f"{source} is a GGUF file of architecture {named!r}; tiedgpt runs the GPT family, "
            f"which GGUF calls {ARCHITECTURE!r}"
        )
    fields = _fields(str(source), pairs)
    tensors: dict[str, LazyTensor] = {}
    for their_name, stored in checkpoint.tensors.items():
        name = to_ours(their_name)
        if name in tensors:
            raise CorruptInputError(f"{source} holds {printable(name)} twice, under two names")
        if not stored.is_decodable:
            raise UserError(
                f"{source}: {printable(their_name)} is {stored.dtype}; F32, F16, BF16, F64 and "
                "Q8_0 are read: convert it first with llama.cpp's "
                "`llama-quantize --allow-requantize FILE NEW_FILE F16`"
            )
        tensors[name] = LazyTensor(stored)
    quantized = sum(tensor.stored.dtype == "Q8_0" for tensor in tensors.values())
    note = f"{quantized} matrices of 8 bits (Q8_0) become float32 when they are loaded"
    assumed = {"activation_function": "gelu_new", "norm": "pre", "layer_norm_epsilon": 1e-5}
    return GPTCheckpoint(
        "GGUF gpt2", fields, tensors, assumed=assumed, notes=(note,) if quantized else ()
    )


def to_theirs(name: str) -> str:
    """Return the name in a GGUF file of a parameter of ours."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"h\.(\d+)\.(.+)", module):
        return f"blk.{match[1]}.{BLOCK_NAMES[match[2]]}.{kind}"
    return f"{TOP_NAMES[module]}.{kind}"


def to_ours(name: str) -> str:
    """Return our name of a tensor in a GGUF file; an unknown name stays."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return name
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        inner = _OURS_IN_BLOCK.get(match[2])
        return name if inner is None else f"h.{match[1]}.{inner}.{kind}"
    return f"{_OURS[module]}.{kind}" if module in _OURS else name


def _fields(source: str, pairs: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, key in SIZE_KEYS.items():
        value = pairs.get(f"{ARCHITECTURE}.{key}")
        if value is not None:
            if type(value) is not int or value < 1:
                raise CorruptInputError(f"{source}: {ARCHITECTURE}.{key}={value!r} is no size")
            fields[name] = value
    if fields.get("n_inner") == 4 * fields.get("n_embd", 0):
        del fields["n_inner"]
    epsilon = pairs.get(f"{ARCHITECTURE}.{EPSILON_KEY}")
    if epsilon is not None:
        fields["layer_norm_epsilon"] = _shortest(epsilon)
    for name, key in ID_KEYS.items():
        if type(pairs.get(key)) is int:
            fields[name] = pairs[key]
    if isinstance(pairs.get(TIE_CLAIM), bool):
        fields["tie_word_embeddings"] = pairs[TIE_CLAIM]
    _refuse_what_changes_attention(source, pairs, fields)
    return fields


def _refuse_what_changes_attention(
    source: str, pairs: Mapping[str, Any], fields: Mapping[str, Any]
) -> None:
    heads = fields.get("n_head")
    head_dim = fields["n_embd"] // heads if heads and "n_embd" in fields else None
    neutral = {
        "attention.head_count_kv": heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.causal": True,
    }
    for key, plain in neutral.items():
        value = pairs.get(f"{ARCHITECTURE}.{key}", plain)
        if value != plain:
            raise UserError(
                f"{source} says {ARCHITECTURE}.{key}={value!r}, which changes the computation and "
                "is not built here"
            )


def _shortest(value: Any) -> Any:
    """Return the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float) and float(single := np.float32(value)) == value:
        return float(str(single))
    return value
