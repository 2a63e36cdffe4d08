"""tiedgpt's own bare state dicts, and what state dicts in nn.Linear's layout have in common.

`torch.save(model.state_dict())` of ours has no prefix; nanoGPT and minGPT have the same names after
one. Matrices lie as (out, in), so that c_attn is (3 D, D). Shapes tell all but the number of heads,
the activation and attention windows.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, Claim, Format, GPTCheckpoint
from tiedgpt.weights.containers import detect, open_container
from tiedgpt.weights.formats.transformers import our_tensors
from tiedgpt.weights.tensors import StoredTensor
from tiedgpt.weights.wrappers import BODY_PREFIX

ACTIVATION = "gelu_new"
NOTE = (
    f"a bare state dict of tiedgpt does not say its activation: {ACTIVATION} and dense "
    "attention are taken; activation_function= (--activation-function) takes another, and "
    "save_pretrained keeps all"
)


def has_prefix(checkpoint: Checkpoint) -> bool:
    """Whether its names are nanoGPT's and minGPT's rather than our own."""
    return any(name.startswith((BODY_PREFIX, "lm_head.")) for name in checkpoint.tensors)


def has_linear_layout(checkpoint: Checkpoint) -> bool:
    """Whether a block's matrices lie as nn.Linear has them: c_attn is (3 D, D)."""
    prefix = BODY_PREFIX if has_prefix(checkpoint) else ""
    c_attn = checkpoint.tensors.get(prefix + "h.0.attn.c_attn.weight")
    return c_attn is not None and len(c_attn.shape) == 2 and c_attn.shape[0] == 3 * c_attn.shape[1]


def has_two_matrices(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether there are an embedding and a head in another storage."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    return embedding is not None and head is not None and not head.is_view_of(embedding)


def has_biases(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether any of the tensors is a bias."""
    return any(name.endswith(".bias") for name in tensors)


def detect_checkpoint(checkpoint: Checkpoint) -> bool:
    """Whether it is a state dict of tiedgpt's own."""
    own_names = EMBEDDING in checkpoint.tensors and not has_prefix(checkpoint)
    return own_names and has_linear_layout(checkpoint)


def claim(checkpoint: Checkpoint) -> Claim | None:
    """Return that a second matrix means an untied head: a tied model saves none."""
    if not has_two_matrices(checkpoint.tensors):
        return None
    return Claim(False, "tiedgpt is tied unless it saves a second matrix")


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT."""
    tensors = our_tensors(checkpoint)
    norm = "pre" if "ln_f.weight" in tensors else "post"
    return GPTCheckpoint(
        "tiedgpt state dict",
        {"bias": has_biases(tensors), "norm": norm},
        tensors,
        assumed={"activation_function": ACTIVATION},
        guesses={"activation_function": NOTE},
    )


FORMAT = Format(
    name="state_dict",
    title="tiedgpt's state dicts",
    about="what `torch.save(model.state_dict())` writes; needs `--n-head`",
    detect=detect,
    open=open_container,
    to_gpt=to_gpt,
    detect_checkpoint=detect_checkpoint,
    claim=claim,
)
