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
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint
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
LOGGED = ("n_layer", "n_head", "n_embd", "embd_pdrop", "attn_pdrop", "resid_pdrop")


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it is a state dict of either minGPT: mask buffers, biases and a head of its own."""
    if _is_first(checkpoint):
        return True
    if "model_args" in checkpoint.config or not has_our_layout(checkpoint):
        return False
    tensors, masked = our_tensors(checkpoint)
    return masked and HEAD in tensors and any(name.endswith(".bias") for name in tensors)


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; its head is a matrix of its own, unless a config.json beside it says not."""
    if _is_first(checkpoint):
        tensors, activation = _first_tensors(checkpoint), "gelu"
    else:
        tensors, activation = our_tensors(checkpoint)[0], "gelu_new"
    tied = HEAD not in tensors if checkpoint.claim is None else checkpoint.claim
    fields: dict[str, Any] = {"tie_word_embeddings": tied}
    logged = checkpoint.config.get("model")  # of minGPT's own config.json
    if isinstance(logged, Mapping):
        fields |= {name: logged[name] for name in LOGGED if logged.get(name) is not None}
        if logged.get("model_type") in tuple(HEADS):
            fields.setdefault("n_head", HEADS[logged["model_type"]])
    return GPTCheckpoint("minGPT", fields, tensors, assumed={"activation_function": activation})


def _is_first(checkpoint: Checkpoint) -> bool:
    return {"tok_emb.weight", "blocks.0.attn.key.weight"} <= checkpoint.tensors.keys()


def _first_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the first minGPT's tensors by our names, queries, keys and values joined."""
    pairs: list[tuple[str, StoredTensor]] = []
    apart: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in checkpoint.tensors.items():
        match = FIRST_BLOCK.fullmatch(name)
        if FIRST_MASK.fullmatch(name):
            continue
        if match is None:
            if name == "pos_emb" and len(stored.shape) == 3 and stored.shape[0] == 1:
                stored = stored.reshaped(stored.shape[1:])
            pairs.append((FIRST_NAMES.get(name, name), stored))
            continue
        layer, part, kind = match.groups()
        if part in QKV:
            apart.setdefault(f"h.{layer}.attn.c_attn.{kind}", {})[part] = stored
        else:
            pairs.append((f"h.{layer}.{FIRST_NAMES.get(part, part)}.{kind}", stored))
    for name, parts in apart.items():
        whole = joined(name, [parts[part] for part in QKV]) if len(parts) == 3 else None
        if whole is None:
            raise CorruptInputError(
                f"{checkpoint.source}: {name} is made of {', '.join(QKV)}, one shape and type each"
            )
        pairs.append((name, whole))
    tensors: dict[str, StoredTensor] = {}
    for name, stored in pairs:
        if name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {printable(name)} under two names")
        tensors[name] = stored
    drop_shared_head(tensors)
    return tensors
