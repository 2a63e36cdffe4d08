"""minGPT's state dicts: two matrices by design, and no word on how many heads there are.

The config.json of minGPT's logging says it, where it lies beside. minGPT of 2022 has nanoGPT's
names, mask buffers, and GELU's tanh form; the first one, of 2020, has names of its own, queries,
keys and values apart, and the exact GELU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.checkpoint import EMBEDDING, Checkpoint, Claim, GPTCheckpoint
from tiedgpt.weights.containers import detect, open_container
from tiedgpt.weights.formats.state_dict import (
    has_biases,
    has_linear_layout,
    has_prefix,
    has_two_matrices,
)
from tiedgpt.weights.formats.transformers import our_tensors
from tiedgpt.weights.registry import Format
from tiedgpt.weights.tensors import Native, Storage, StoredTensor, printable

FIRST = {"tok_emb.weight", "blocks.0.attn.key.weight"}
"""Names that only the minGPT of 2020 has."""
FIRST_NAMES = {
    "tok_emb.weight": EMBEDDING, "pos_emb": "wpe.weight", "blocks.": "h.", ".ln1.": ".ln_1.",
    ".ln2.": ".ln_2.", ".attn.proj.": ".attn.c_proj.", ".attn.mask": ".attn.bias",
    ".mlp.0.": ".mlp.c_fc.", ".mlp.2.": ".mlp.c_proj.",
}  # fmt: skip
"""Parts of its names -> ours."""
HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25,
    "gopher-44m": 16, "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""minGPT's model_type -> n_head."""
LOGGED = ("n_layer", "n_head", "n_embd", "embd_pdrop", "attn_pdrop", "resid_pdrop")
"""Fields in minGPT's config.json."""


def is_first(checkpoint: Checkpoint) -> bool:
    """Whether it is of the minGPT of 2020."""
    return checkpoint.tensors.keys() >= FIRST


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it has minGPT's names, and as nanoGPT's has not: masks, biases and two matrices."""
    if is_first(checkpoint):
        return True
    if "model_args" in checkpoint.config or not has_prefix(checkpoint):
        return False
    tensors = our_tensors(checkpoint.source, checkpoint.tensors)
    is_masked = len(tensors) < len(checkpoint.tensors)
    apart = is_masked and has_biases(tensors) and has_two_matrices(tensors)
    return apart and has_linear_layout(checkpoint)


def claim(checkpoint: Checkpoint) -> Claim | None:
    """Return that two matrices are meant to be two."""
    tensors = our_tensors(checkpoint.source, _names_of_2022(checkpoint))
    return Claim(False, "minGPT is untied by design") if has_two_matrices(tensors) else None


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT."""
    tensors = our_tensors(checkpoint.source, _names_of_2022(checkpoint))
    logged = checkpoint.config.get("model")
    logged = logged if isinstance(logged, Mapping) else {}
    fields: dict[str, Any] = {"bias": has_biases(tensors)}
    fields |= {name: logged[name] for name in LOGGED if logged.get(name) is not None}
    if logged.get("model_type") in tuple(HEADS):
        fields.setdefault("n_head", HEADS[logged["model_type"]])
    gelu = "gelu" if is_first(checkpoint) else "gelu_new"
    return GPTCheckpoint("minGPT", fields, tensors, assumed={"activation_function": gelu})


def _names_of_2022(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    """Return the first minGPT's tensors under the second's names; all others as they are."""
    if not is_first(checkpoint):
        return checkpoint.tensors
    tensors: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        if name == "pos_emb" and len(stored.shape) == 3 and stored.shape[0] == 1:
            stored = stored.reshaped(stored.shape[1:])
        for theirs, ours in FIRST_NAMES.items():
            name = name.replace(theirs, ours)
        if name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {printable(name)} twice")
        tensors[name] = stored
    _join_qkv(checkpoint.source, tensors)
    return tensors


def _join_qkv(source: object, tensors: dict[str, StoredTensor]) -> None:
    """Replace h.N.attn.query, .key and .value, lying as (out, in), by one h.N.attn.c_attn.

    Raises `CorruptInputError`, naming `source`, where they are not alike.
    """
    for query in [name for name in tensors if ".attn.query." in name]:
        names = [query.replace("query", part) for part in ("query", "key", "value")]
        parts = [tensors.pop(name) for name in names if name in tensors]
        c_attn = query.replace("query", "c_attn")
        alike = {(part.shape, part.dtype, part.read is None) for part in parts}
        if len(parts) < 3 or len(alike) > 1 or len(parts[0].shape) not in (1, 2):
            raise CorruptInputError(
                f"{source}: {printable(c_attn)} needs attn.query, attn.key, attn.value, of one "
                "shape and type"
            )
        tensors[c_attn] = _join(c_attn, parts)


def _join(name: str, parts: list[StoredTensor]) -> StoredTensor:
    first = parts[0]
    axis = 1 if len(first.shape) == 1 else 0  # a vector is read as a matrix of one row

    def read(start: int, end: int, left: int, right: int) -> Native:
        whole = np.concatenate([part.native(0, part.matrix_shape[0]) for part in parts], axis)
        return np.ascontiguousarray(whole[start:end, left:right])

    n_bytes = sum(part.n_bytes for part in parts)
    return replace(
        first, name=name, shape=(len(parts) * first.shape[0], *first.shape[1:]), n_bytes=n_bytes,
        storage=Storage(tuple(part.storage for part in parts), 0, n_bytes), strides=None,
        read=None if first.read is None else read,
    )  # fmt: skip


FORMAT = Format(
    name="mingpt",
    title="minGPT",
    about="state dicts; untied by design; needs `--n-head`",
    detect=detect,
    open=open_container,
    to_gpt=to_gpt,
    is_copied_by_fix=True,
    recognizes=recognizes,
    claim=claim,
)
