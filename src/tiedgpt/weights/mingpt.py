"""minGPT's bare state dicts: two matrices by design, and no word on how many heads there are.

The heads are known where the config.json of minGPT's logging lies beside. minGPT of 2022 has
OpenAI's names over nn.Linear's layout, mask buffers, and GELU's tanh form; the first one, of 2020,
has names of its own, queries, keys and values apart, and the exact GELU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.nanogpt import drop_shared_head, has_our_layout, our_tensors
from tiedgpt.weights.tensors import StoredTensor, joined, printable

HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25,
    "gopher-44m": 16, "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""minGPT's model_type -> n_head."""
FIRST_NAMES = {
    "tok_emb.weight": EMBEDDING,
    "pos_emb": "wpe.weight",
    "head.weight": HEAD,
    "ln1": "ln_1",
    "ln2": "ln_2",
    "attn.proj": "attn.c_proj",
    "mlp.0": "mlp.c_fc",
    "mlp.2": "mlp.c_proj",
}
"""The first minGPT's names -> ours; from ln1 on, of a part of a block."""
FIRST_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.([\w.]+)\.(weight|bias)")
FIRST_MASK = re.compile(r"blocks\.\d+\.attn\.mask")
QKV = ("attn.query", "attn.key", "attn.value")
"""What c_attn holds, in its order."""


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it is a state dict of either minGPT: mask buffers, biases and a head of its own."""
    if checkpoint.format not in ("torch", "safetensors"):
        return False
    if _is_first(checkpoint):
        return True
    if "model_args" in checkpoint.config or "lm_head.weight" not in checkpoint.tensors:
        return False
    if not has_our_layout(checkpoint):
        return False
    tensors, masked = our_tensors(checkpoint)
    return masked and HEAD in tensors and any(name.endswith(".bias") for name in tensors)


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; its head is a matrix of its own, unless a config.json beside it says not."""
    if _is_first(checkpoint):
        tensors, activation = _first_tensors(checkpoint), "gelu"
    else:
        tensors, activation = our_tensors(checkpoint)[0], "gelu_new"
    return GPTCheckpoint(
        "minGPT", _fields(checkpoint, tensors), tensors,
        assumed={"activation_function": activation},
    )  # fmt: skip


def _fields(checkpoint: Checkpoint, tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the claim, and what minGPT's own config.json says where it lies beside."""
    claim = checkpoint.claim
    fields: dict[str, Any] = {
        "tie_word_embeddings": HEAD not in tensors if claim is None else claim
    }
    model = checkpoint.config.get("model")
    if not isinstance(model, Mapping):
        return fields
    for name in ("n_layer", "n_head", "n_embd", "embd_pdrop", "attn_pdrop", "resid_pdrop"):
        if model.get(name) is not None:
            fields[name] = model[name]
    kind = model.get("model_type")
    if isinstance(kind, str) and kind in HEADS:
        fields.setdefault("n_head", HEADS[kind])
    return fields


def _is_first(checkpoint: Checkpoint) -> bool:
    return {"tok_emb.weight", "blocks.0.attn.key.weight"} <= checkpoint.tensors.keys()


def _first_tensors(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """Return the first minGPT's tensors by our names, queries, keys and values joined."""
    tensors: dict[str, LazyTensor] = {}
    apart: dict[str, list[StoredTensor | None]] = {}

    def put(name: str, stored: StoredTensor) -> None:
        if name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {printable(name)} under two names")
        tensors[name] = LazyTensor(stored)

    for their_name, stored in checkpoint.tensors.items():
        match = FIRST_BLOCK.fullmatch(their_name)
        if FIRST_MASK.fullmatch(their_name):
            continue
        if match is None:
            name = FIRST_NAMES.get(their_name, their_name)
            if name == "wpe.weight" and len(stored.shape) == 3 and stored.shape[0] == 1:
                stored = stored.reshaped(stored.shape[1:])
            put(name, stored)
            continue
        layer, part, kind = match.groups()
        if part in QKV:
            parts = apart.setdefault(f"h.{layer}.attn.c_attn.{kind}", [None, None, None])
            parts[QKV.index(part)] = stored
        else:
            put(f"h.{layer}.{FIRST_NAMES.get(part, part)}.{kind}", stored)
    for name, parts in apart.items():
        put(name, _joined(checkpoint, name, parts))
    drop_shared_head(tensors)
    return tensors


def _joined(checkpoint: Checkpoint, name: str, parts: list[StoredTensor | None]) -> StoredTensor:
    """Return queries, keys and values as the rows of one tensor; nothing is read."""
    present = [part for part in parts if part is not None]
    whole = joined(name, present) if len(present) == len(parts) else None
    if whole is None:
        shapes = ", ".join(f"{part.name} {part.shape} {part.dtype}" for part in present)
        raise CorruptInputError(
            f"{checkpoint.source}: {name} is made of {', '.join(QKV)}, one shape and type each; "
            f"there are {shapes}"
        )
    return whole
