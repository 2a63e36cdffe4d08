"""Random models of every shape that the functions must hold for."""

from pathlib import Path

import pytest
import torch

from tests.models import random_gpt, save_model
from tiedgpt import GPT, Tokenizer

TEXT = "the cat sat on the mat, and the cat sat"


def random_model(
    *, norm="pre", tied=True, bias=True, windows=None, dtype=torch.float32, seed=0, vocab_size=97
) -> GPT:
    """A model whose weights are large enough that mistakes show."""
    return random_gpt(
        seed, 0.3, vocab_size=vocab_size, n_positions=80, n_embd=16, n_layer=2, n_head=2,
        norm=norm, tie_word_embeddings=tied, bias=bias, attention_windows=windows,
    ).to(dtype)  # fmt: skip


def random_ids(n: int = 70, seed: int = 0, vocab_size: int = 97) -> torch.Tensor:
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 3, "naïve café — 文字"], 300)


@pytest.fixture
def model(tokenizer) -> GPT:
    return random_model(vocab_size=len(tokenizer))


@pytest.fixture
def here(model, tokenizer, tmp_path, monkeypatch) -> Path:
    """The current directory, which holds the model with its tokenizer in `model`."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("model"), model, tokenizer)
    return tmp_path
