"""A model with opinions, saved as transformers reads it, and an engine on it."""

import pytest
import torch

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.infer import Engine

TEXT = "the cat sat on the mat. the dog ate the hat — naïve café, 日本語. " * 20


@pytest.fixture(scope="package")
def directory(tmp_path_factory):
    tokenizer = Tokenizer.train([TEXT], 300)
    torch.manual_seed(5)
    config = GPTConfig(
        vocab_size=len(tokenizer), n_positions=48, n_embd=32, n_layer=2, n_head=2,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="package")
def engine(directory):
    with Engine(directory) as engine:
        yield engine
