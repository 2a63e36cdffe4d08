"""Saved models, a tokenizer, and the comparison with a model of transformers."""

from pathlib import Path

import pytest
import torch

from tests.tie.checkpoints import rewrite as rewrite_directory
from tests.weights.fake_hub import hub as hub
from tiedgpt import GPT, Tokenizer

TEXTS = [
    "the quick brown fox, the lazy dog. It's 1234 o'clock; über-ähnlich 🚀🚀 \n\n  tab\t. " * 20
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 310 tokens, which no test changes."""
    return Tokenizer.train(TEXTS, 310)


@torch.no_grad()
def assert_same_logits(ours: GPT, peer, ids: torch.Tensor | None = None) -> None:
    """Assert that a model of transformers computes the same."""
    if ids is None:
        generator, config = torch.Generator().manual_seed(0), ours.config
        ids = torch.randint(config.vocab_size, (2, config.n_positions), generator=generator)
    a, b = ours(ids), peer(ids).logits
    assert b.std() > 0.1
    assert (a - b).abs().max() <= 1e-4
    assert (a - b).norm() <= 2e-6 * b.norm()


@pytest.fixture
def saved(tiny: GPT, tmp_path: Path) -> Path:
    """A directory that we wrote."""
    tiny.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def rewrite(saved: Path):
    """Change a saved model: config keys, and tensors by a function of their dict."""

    def change(*, config: dict | None = None, tensors=None) -> Path:
        return rewrite_directory(saved, tensors, **(config or {}))

    return change


def with_head(scale: float = 1.0):
    """Add lm_head.weight, the embedding scaled."""
    return lambda state: state | {"lm_head.weight": scale * state["transformer.wte.weight"]}
