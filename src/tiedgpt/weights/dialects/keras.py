"""KerasHub's (and KerasNLP's) GPT-2: its backbone's variables by Keras's paths -> our names.

Matrices lie as (in, out). Queries, keys and values are apart, with the heads on an axis of their
own, (D, H, D/H), and the output's as (H, D/H, D): so the weights themselves say how many heads
there are. GPT2Backbone computes the tanh form of GELU and norms with 1e-5, before each sublayer and
at the end; GPT2CausalLM predicts with the matrix that reads (keras-team/keras-hub,
`models/gpt2/gpt2_backbone.py` and `gpt2_causal_lm.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.tensors import Native, StoredTensor, joined, printable

BACKBONE, TASKS = "GPT2Backbone", ("GPT2CausalLM",)
TOP_NAMES = {
    "reversible_embedding/vars/0": "wte.weight",
    "position_embedding/vars/0": "wpe.weight",
    "layer_normalization/vars/0": "ln_f.weight",
    "layer_normalization/vars/1": "ln_f.bias",
}
BLOCK_NAMES = {
    "_self_attention_layer_norm": "ln_1",
    "_self_attention_layer/output_dense": "attn.c_proj",
    "_feedforward_layer_norm": "ln_2",
    "_feedforward_intermediate_dense": "mlp.c_fc",
    "_feedforward_output_dense": "mlp.c_proj",
}
QKV = tuple(f"_self_attention_layer/{part}_dense" for part in ("query", "key", "value"))
"""What c_attn holds, in its order."""
KINDS = ("weight", "bias")
"""vars/0 and vars/1."""
SIZES = {
    "vocabulary_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_dim": "n_embd",
    "intermediate_dim": "n_inner",
    "max_sequence_length": "n_positions",
}
"""GPT2Backbone's arguments -> ours."""
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
ALWAYS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "norm": "pre",
    "bias": True,
    "tie_word_embeddings": True,
}
_BODY = re.compile(r"(?:.*/)?(?:layers|_layer_checkpoint_dependencies)/")
"""What stands before a layer's name: the task's path to its backbone, and Keras's list."""
_BLOCK = re.compile(r"transformer_decoder(?:_([1-9]\d{0,5}))?/([\w/]+)/vars/([01])")


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in what Keras saved.

    Raises `UserError` for other models, `CorruptInputError` where variables contradict each other.
    """
    source = str(checkpoint.source)
    fields: dict[str, Any] = dict(ALWAYS) | _said(source, checkpoint.config)
    tensors: dict[str, LazyTensor] = {}
    apart: dict[str, dict[str, StoredTensor]] = {}
    n_heads: set[int] = set()
    for path, stored in checkpoint.tensors.items():
        inner = _BODY.sub("", path, count=1)
        block = _BLOCK.fullmatch(inner)
        if block is None:
            name, tensor = TOP_NAMES.get(inner, path), LazyTensor(stored)
        else:
            layer, part, kind = int(block[1] or 0), block[2], KINDS[int(block[3])]
            if part in QKV:
                flat = _heads_joined(source, stored, kind, n_heads)
                whole = apart.setdefault(f"h.{layer}.attn.c_attn.{kind}", {})
                if part in whole:
                    raise CorruptInputError(f"{source} holds {printable(path)[:200]} twice")
                whole[part] = flat
                continue
            name = f"h.{layer}.{BLOCK_NAMES[part]}.{kind}" if part in BLOCK_NAMES else path
            tensor = _in_our_layout(stored, name)
        if name in tensors:
            raise CorruptInputError(f"{source} holds {name} twice, in two models")
        tensors[name] = tensor
    if "wte.weight" not in tensors or not apart:
        raise UserError(
            f"{source} holds a model of Keras that is no {BACKBONE} of KerasHub: only that one is "
            "read"
        )
    for name, parts in apart.items():
        tensors[name] = _c_attn(source, name, parts)
    if len(n_heads) > 1 or fields.setdefault("n_head", min(n_heads)) not in n_heads:
        raise CorruptInputError(
            f"{source}: its layers have {' and '.join(map(str, sorted(n_heads)))} heads, where "
            f"{fields.get('n_head', 'one number')} are said"
        )
    return GPTCheckpoint("KerasHub GPT-2", fields, tensors)


def _said(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says, where it lies beside or in the archive, under our names."""
    said: Any = config.get("keras", config)
    if "class_name" not in said:
        return {}
    if said.get("class_name") in TASKS and isinstance(said.get("config"), Mapping):
        said = said["config"].get("backbone")
    if not isinstance(said, Mapping) or said.get("class_name") != BACKBONE:
        named = said.get("class_name") if isinstance(said, Mapping) else said
        raise UserError(
            f"{source} holds a {printable(str(named))[:80]} of Keras; only KerasHub's "
            f"{BACKBONE} and {' or '.join(TASKS)} are read"
        )
    inner = said.get("config")
    if not isinstance(inner, Mapping):
        raise CorruptInputError(f"{source}: its config.json says nothing of its {BACKBONE}")
    fields = {ours: inner[theirs] for theirs, ours in SIZES.items() if inner.get(theirs)}
    if not all(type(value) is int and value > 0 for value in fields.values()):
        raise CorruptInputError(f"{source}: its config.json has sizes that are none")
    if isinstance(inner.get("dropout"), (int, float)):
        fields |= dict.fromkeys(DROPOUTS, inner["dropout"])
    if fields.get("n_inner") == 4 * fields.get("n_embd", 0):
        del fields["n_inner"]
    return fields


def _heads_joined(source: str, stored: StoredTensor, kind: str, n_heads: set[int]) -> StoredTensor:
    """Return (D, H, D/H) as (D, D), and a bias of (H, D/H) as (D,), the heads one by one."""
    if len(stored.shape) != (3 if kind == "weight" else 2) or not stored.count:
        raise CorruptInputError(
            f"{source}: {printable(stored.name)[:200]} is {stored.shape}, not one part a head"
        )
    heads, head_dim = stored.shape[-2:]
    n_heads.add(heads)
    whole, width = stored.read, heads * head_dim

    def read(first: int, end: int, left: int, right: int) -> Native:
        assert whole is not None
        rows = whole(first * heads, end * heads, 0, head_dim)
        return rows.reshape(end - first, width)[:, left:right]

    return replace(stored, shape=(*stored.shape[:-2], width), read=None if whole is None else read)


def _c_attn(source: str, name: str, parts: dict[str, StoredTensor]) -> LazyTensor:
    """Return queries, keys and values as the rows of one matrix, (3 D, D)."""
    if missing := [part for part in QKV if part not in parts]:
        raise CorruptInputError(f"{source}: {missing[0]} is missing in {name}")
    there = [parts[part] for part in QKV]
    whole = joined(name, [part.turned() if len(part.shape) == 2 else part for part in there])
    if whole is None:
        shapes = ", ".join(f"{part.shape} {part.dtype}" for part in there)
        raise CorruptInputError(f"{source}: {name} is made of parts that are not alike: {shapes}")
    return LazyTensor(whole)


def _in_our_layout(stored: StoredTensor, name: str) -> LazyTensor:
    """Return a matrix to be changed over; the output's heads, (H, D/H, D), become rows of one."""
    if name.endswith("attn.c_proj.weight") and len(stored.shape) == 3:
        stored = stored.reshaped((stored.shape[0] * stored.shape[1], stored.shape[2]))
    return LazyTensor(stored, transposed=name.endswith(".weight"))
