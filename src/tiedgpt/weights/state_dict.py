"""A bare state dict of our own GPT: `torch.save(model.state_dict())`, or a training checkpoint.

It has our names and layout and no prefix. Shapes tell all but the number of heads, the activation
and attention windows.
"""

from __future__ import annotations

from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint
from tiedgpt.weights.nanogpt import drop_shared_head, has_our_layout, is_prefixed

ACTIVATION = "gelu_new"
NOTE = (
    f"a bare state dict of tiedgpt does not say its activation: {ACTIVATION} and dense attention "
    "are taken; activation_function= (--activation-function) takes another, and save_pretrained "
    "keeps all"
)


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it has our names, none of them with another project's prefix, and our layout."""
    named = EMBEDDING in checkpoint.tensors and not is_prefixed(checkpoint)
    return named and has_our_layout(checkpoint)


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; it is tied unless it holds a head."""
    tensors = dict(checkpoint.tensors)
    drop_shared_head(tensors)
    tied = HEAD not in tensors if checkpoint.claim is None else checkpoint.claim
    fields = {
        "bias": any(name.endswith(".bias") for name in tensors),
        "norm": "pre" if "ln_f.weight" in tensors else "post",
        "tie_word_embeddings": tied,
    }
    return GPTCheckpoint(
        "tiedgpt state dict", fields, tensors, assumed={"activation_function": ACTIVATION},
        guesses={"activation_function": NOTE},
    )  # fmt: skip
