"""The one table of names and layouts: how our parameters are called and laid out in files.

Ours are OpenAI's names with nn.Linear's layout (out, in). Files of transformers use the same
names after a prefix, with the matrices of the blocks as (in, out).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tiedgpt.core.config import ACTIVATIONS, GPTConfig

HEAD = "head.weight"
EMBEDDING = "wte.weight"
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks that old transformers saved beside the weights; they are no parameters."""


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of transformers: its class, its names, and its config's odd names."""

    name: str
    architecture: str
    prefix: str
    tensor_names: dict[str, str]
    """Ours -> theirs, where they differ (after the prefix)."""
    config_names: dict[str, str]
    """Ours -> theirs, where they differ."""
    activations: dict[str, str]
    """Ours -> theirs."""
    norm: str | None
    """Which norm the class has; None where the config says it."""


GPT2 = ModelType(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    tensor_names={},
    config_names={},
    activations={"gelu_new": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"},
    norm="pre",
)
GPT1 = ModelType(
    name="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    prefix="transformer.",
    tensor_names={"wte.weight": "tokens_embed.weight", "wpe.weight": "positions_embed.weight"},
    config_names={"activation_function": "afn"},
    activations={"gelu_new": "gelu", "relu": "relu", "silu": "silu"},  # its "gelu" is the tanh form
    norm="post",
)
TIEDGPT = ModelType(
    name="tiedgpt",
    architecture="TiedGPTLMHeadModel",
    prefix="transformer.",
    tensor_names={},
    config_names={},
    activations={name: name for name in ACTIVATIONS},
    norm=None,
)
"""Ours, for what transformers has no class for: it refuses the name and computes nothing wrong."""
PACKED = replace(TIEDGPT, name="tiedgpt-packed", architecture="TiedGPTPackedLMHeadModel")
"""Ours as well, packed for CPU kernels (`packed/file.py`)."""
MODEL_TYPES = {model_type.name: model_type for model_type in (GPT2, GPT1, TIEDGPT, PACKED)}


def model_type_of(config: GPTConfig) -> ModelType:
    """Return the class of transformers that computes what this config describes, else our own."""
    if config.attention_windows is not None:
        return TIEDGPT
    if config.norm == "pre":
        return GPT2
    plain = config.activation_function in GPT1.activations
    return GPT1 if plain and config.inner_dim == 4 * config.n_embd else TIEDGPT


def is_transposed(name: str) -> bool:
    """Whether transformers stores this parameter of ours as (in, out)."""
    return bool(re.fullmatch(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight", name))


def to_file(name: str, model_type: ModelType) -> str:
    """Return the name in a file of transformers of a parameter of ours."""
    if name == HEAD:
        return "lm_head.weight"
    return model_type.prefix + model_type.tensor_names.get(name, name)


def from_file(name: str, model_type: ModelType) -> str | None:
    """Return our name of a tensor in a file of transformers; None for a mask buffer."""
    if name == "lm_head.weight":
        return HEAD
    bare = name.removeprefix(model_type.prefix)
    if MASK_BUFFERS.fullmatch(bare):
        return None
    theirs = {their_name: ours for ours, their_name in model_type.tensor_names.items()}
    return theirs.get(bare, bare)


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of `GPT(config)` by our names, without torch."""
    width, inner = config.n_embd, config.inner_dim
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (inner, width),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (width, inner),
        "mlp.c_proj.bias": (width,),
    }
    found: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, width),
        "wpe.weight": (config.n_positions, width),
    }
    for layer in range(config.n_layer):
        found |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    if config.norm == "pre":
        found |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    if not config.tie_word_embeddings:
        found[HEAD] = (config.vocab_size, width)
    if not config.bias:
        found = {name: shape for name, shape in found.items() if not name.endswith(".bias")}
    return found


def with_biases(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a format needs which knows no model without biases."""
    return shapes(replace(config, bias=True))
