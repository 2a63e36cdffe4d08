"""Tiny models of every architecture, and what their packed weights stand for."""

import torch

from tests.models import random_gpt
from tiedgpt import GPT
from tiedgpt.weights.formats.packed import STACKS, PackedModel, stack_sizes
from tiedgpt.weights.formats.packed.panels import Panels, unpack

ARCHITECTURES = {
    "GPT-2": {},
    "banded": {"attention_windows": (0, 5), "n_layer": 3},
    "without biases": {"bias": False},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "GPT-1": {"norm": "post"},
    "GPT-1 without biases, banded": {"norm": "post", "bias": False, "attention_windows": (3,)},
    "untied": {"tie_word_embeddings": False},
    "odd sizes": {"n_embd": 69, "n_head": 3, "n_inner": 130, "vocab_size": 131, "n_layer": 1},
    "heads of 80": {"n_embd": 160, "n_head": 2, "n_layer": 1},
}


def made(**changes) -> GPT:
    """A model whose weights are large enough that mistakes show."""
    return random_gpt(std=0.15, **{"n_layer": 2, **changes})


def stood_for(model: GPT, packed: PackedModel) -> GPT:
    """Return the model whose matrices are the dequantized panels."""
    state = model.state_dict()
    config, arrays = packed.config, packed.arrays

    def put(name, weights, scales, rows, width):
        state[f"{name}.weight"] = torch.from_numpy(unpack(Panels(weights, scales, rows, width)))

    for name in ("wte", "head") if model.head is not None else ("wte",):
        weights, scales = arrays[f"{name}.weights"], arrays[f"{name}.scales"]
        put(name, weights, scales, config.vocab_size, config.n_embd)
    for name, (rows, width) in stack_sizes(config).items():
        for layer in range(config.n_layer):
            weights, scales = arrays[f"{name}.weights"], arrays[f"{name}.scales"]
            scales = scales[layer] if scales.size else scales
            put(f"h.{layer}.{STACKS[name]}", weights[layer], scales, rows, width)
    other = GPT(config).eval()
    other.load_state_dict(state)
    return other
