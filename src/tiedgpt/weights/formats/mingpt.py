"""minGPT's state dicts: two matrices by design, nanoGPT's names and GELU's tanh form.

The file does not say how many heads there are. The config.json that minGPT logs next to it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiedgpt.weights.checkpoint import Checkpoint, Claim, Format, GPTCheckpoint
from tiedgpt.weights.containers import detect, open_container
from tiedgpt.weights.formats.state_dict import (
    has_biases,
    has_linear_layout,
    has_prefix,
    has_two_matrices,
)
from tiedgpt.weights.formats.transformers import our_tensors

HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25,
    "gopher-44m": 16, "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""minGPT's model_type -> n_head."""
LOGGED = ("n_layer", "n_head", "n_embd", "embd_pdrop", "attn_pdrop", "resid_pdrop")
"""Fields in minGPT's config.json."""


def detect_checkpoint(checkpoint: Checkpoint) -> bool:
    """Return whether it has minGPT's masks, biases and two matrices, unlike nanoGPT's."""
    if "model_args" in checkpoint.config or not has_prefix(checkpoint):
        return False
    tensors = our_tensors(checkpoint)
    is_masked = len(tensors) < len(checkpoint.tensors)
    apart = is_masked and has_biases(tensors) and has_two_matrices(tensors)
    return apart and has_linear_layout(checkpoint)


def claim(checkpoint: Checkpoint) -> Claim:
    """Return that the two matrices, without which it is not recognized, are meant to be two."""
    return Claim(False, "minGPT is untied by design")


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT."""
    tensors = our_tensors(checkpoint)
    logged = checkpoint.config.get("model")
    logged = logged if isinstance(logged, Mapping) else {}
    fields: dict[str, Any] = {"bias": has_biases(tensors)}
    fields |= {name: logged[name] for name in LOGGED if logged.get(name) is not None}
    if logged.get("model_type") in tuple(HEADS):
        fields.setdefault("n_head", HEADS[logged["model_type"]])
    return GPTCheckpoint("minGPT", fields, tensors, assumed={"activation_function": "gelu_new"})


FORMAT = Format(
    name="mingpt",
    title="minGPT",
    about="state dicts; untied by design; needs `--n-head`",
    detect=detect,
    open=open_container,
    to_gpt=to_gpt,
    detect_checkpoint=detect_checkpoint,
    claim=claim,
)
