"""The named sizes, from tiny to GPT-3, each with the recipe that suits it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tiedgpt.core.config import PRESETS


@dataclass(frozen=True, kw_only=True)
class Size:
    """A named shape with the recipe that suits it."""

    n_layer: int
    n_embd: int
    n_head: int
    n_positions: int
    vocab_size: int
    """Tokens of a vocabulary trained for it."""
    batch_size: int
    """Sequences in a step."""
    lr: float
    """Peak learning rate, with Muon; measured for tiny and mini (`bench/recipe.py`)."""
    lr_adamw: float | None = None
    """With AdamW alone; None: the same."""
    weight_decay: float = 0.1
    """Of the blocks' matrices; more for small models that see their text several times."""
    dropout: float = 0.0


def _published(name: str, lr: float) -> Size:
    """A preset of the papers; peak rates as in Brown et al. 2020, table 2.1."""
    shape = {key: PRESETS[name][key] for key in ("n_layer", "n_embd", "n_head", "n_positions")}
    return Size(**shape, vocab_size=PRESETS[name]["vocab_size"], batch_size=16, lr=lr, dropout=0.1)


SIZES: dict[str, Size] = {
    "tiny": Size(
        n_layer=2,
        n_embd=128,
        n_head=4,
        n_positions=128,
        vocab_size=1024,
        batch_size=16,
        lr=1.2e-2,
        lr_adamw=4e-3,
        weight_decay=0.3,
    ),
    "mini": Size(
        n_layer=4, n_embd=256, n_head=4, n_positions=128, vocab_size=4096, batch_size=8, lr=3e-3
    ),
    "small": Size(
        n_layer=6, n_embd=384, n_head=6, n_positions=256, vocab_size=4096, batch_size=16, lr=2e-3
    ),
    "medium": Size(
        n_layer=8, n_embd=512, n_head=8, n_positions=512, vocab_size=8192, batch_size=16, lr=1e-3
    ),
    "gpt1": _published("gpt1", 2.5e-4),
    "gpt2": _published("gpt2", 6e-4),
    "gpt2-medium": _published("gpt2-medium", 3e-4),
    "gpt2-large": _published("gpt2-large", 2.5e-4),
    "gpt2-xl": _published("gpt2-xl", 2e-4),
    "gpt3-small": _published("gpt3-small", 6e-4),
    "gpt3-medium": _published("gpt3-medium", 3e-4),
    "gpt3-large": _published("gpt3-large", 2.5e-4),
    "gpt3-xl": _published("gpt3-xl", 2e-4),
    "gpt3-2.7b": _published("gpt3-2.7b", 1.6e-4),
    "gpt3-6.7b": _published("gpt3-6.7b", 1.2e-4),
    "gpt3-13b": _published("gpt3-13b", 1e-4),
    "gpt3-175b": _published("gpt3-175b", 0.6e-4),
}
DEFAULT_SIZE = "mini"
