"""The named sizes of a model, each with the recipe that suits it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from tiedgpt.core.config import PRESETS


@dataclass(frozen=True)
class Size:
    """A named shape with the recipe that suits it."""

    n_layer: int
    n_embd: int
    n_head: int
    n_positions: int
    vocab_size: int
    """Tokens of a vocabulary trained for it."""
    lr: float
    """Peak learning rate, with Muon; measured for tiny and mini (`bench/recipe.py`)."""
    _: KW_ONLY
    lr_adamw: float | None = None
    """With AdamW alone; None: the same."""
    batch_size: int = 16
    """Sequences in a step."""
    batch_tokens: int | None = None
    """Tokens in a step on a GPU, as published; None: those of `batch_size`."""
    weight_decay: float = 0.1
    """Weight decay of the blocks' matrices; more for small models, which repeat their text."""
    dropout: float = 0.0


SHAPE = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
PUBLISHED_RATES = {
    "gpt1": 2.5e-4, "gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4,
    "gpt3-small": 6e-4, "gpt3-medium": 3e-4, "gpt3-large": 2.5e-4, "gpt3-xl": 2e-4,
    "gpt3-2.7b": 1.6e-4, "gpt3-6.7b": 1.2e-4, "gpt3-13b": 1e-4, "gpt3-175b": 0.6e-4,
}  # fmt: skip
"""Peak rates of the presets: Brown et al. 2020, table 2.1."""
PUBLISHED_BATCHES = {
    "gpt1": 1 << 15, "gpt2": 1 << 19, "gpt2-medium": 1 << 19, "gpt2-large": 1 << 19,
    "gpt2-xl": 1 << 20, "gpt3-small": 1 << 19, "gpt3-medium": 1 << 19, "gpt3-large": 1 << 19,
    "gpt3-xl": 1 << 20, "gpt3-2.7b": 1 << 20, "gpt3-6.7b": 1 << 21, "gpt3-13b": 1 << 21,
    "gpt3-175b": 3 << 20,
}  # fmt: skip
"""Tokens in a step of the presets: Radford et al. 2018, section 4.1; Brown et al. 2020, table 2.1.
"""
RECIPES: dict[str, dict[str, Any]] = {
    "nano": {"lr": 1.6e-2, "weight_decay": 0.3},
    "tiny": {"lr": 1.2e-2, "lr_adamw": 4e-3, "weight_decay": 0.3},
    "little": {"lr": 1e-2, "lr_adamw": 3e-3, "weight_decay": 0.3},
    "slim": {"lr": 3.5e-3, "batch_size": 8, "weight_decay": 0.3},
    "mini": {"lr": 3e-3, "batch_size": 8},
    "small": {"lr": 2e-3},
    "medium": {"lr": 1e-3},
} | {
    name: {"lr": lr, "batch_tokens": PUBLISHED_BATCHES[name], "dropout": 0.1}
    for name, lr in PUBLISHED_RATES.items()
}
SIZES = {
    name: Size(**{key: PRESETS[name][key] for key in SHAPE}, **recipe)
    for name, recipe in RECIPES.items()
}
