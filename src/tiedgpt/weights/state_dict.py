"""A bare state dict of our own GPT: `torch.save(model.state_dict())`, or a training checkpoint.

It has our names and layout and no prefix. Shapes tell all but the number of heads, the activation
and attention windows.
"""

from __future__ import annotations

from typing import Any

from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.nanogpt import PREFIX, drop_shared_head, has_our_layout

ACTIVATION = "gelu_new"
NOTE = (
    f"a bare state dict of tiedgpt does not say its activation: {ACTIVATION} and dense attention "
    "are taken; activation_function= (--activation-function) takes another, and save_pretrained "
    "keeps all"
)


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it has our names, none of them with another project's prefix, and our layout."""
    if checkpoint.format not in ("torch", "safetensors") or EMBEDDING not in checkpoint.tensors:
        return False
    prefixed = any(name.startswith((PREFIX, "lm_head.")) for name in checkpoint.tensors)
    return not prefixed and has_our_layout(checkpoint)


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; it is tied unless it holds a head."""
    tensors = {name: LazyTensor(stored) for name, stored in checkpoint.tensors.items()}
    drop_shared_head(tensors)
    fields: dict[str, Any] = {
        "bias": any(name.endswith(".bias") for name in tensors),
        "norm": "pre" if "ln_f.weight" in tensors else "post",
        "tie_word_embeddings": HEAD not in tensors,
    }
    if checkpoint.claim is not None:
        fields["tie_word_embeddings"] = checkpoint.claim
    return GPTCheckpoint(
        "tiedgpt state dict", fields, tensors, assumed={"activation_function": ACTIVATION},
        guesses={"activation_function": NOTE},
    )  # fmt: skip
