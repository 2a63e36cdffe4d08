"""A tokenizer, and an engine on random weights strong enough to have opinions."""

import pytest
import torch

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.infer import Engine
from tiedgpt.infer.beam import beam_search
from tiedgpt.infer.joint import Search, together

TEXT = "the cat sat on the mat. the dog ate the hat — naïve café, 日本語. " * 20


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train([TEXT], 300)


@pytest.fixture(scope="package")
def engine(tokenizer):
    torch.manual_seed(5)
    config = GPTConfig(
        vocab_size=len(tokenizer), n_positions=48, n_embd=32, n_layer=2, n_head=2,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return Engine(model, tokenizer=tokenizer)


@pytest.fixture(scope="package", params=["torch", "fp32", "int8"])
def backend(request, engine):
    """The engine on torch and on the kernels, whose scores no neighbour changes by a bit."""
    if request.param == "torch":
        return engine
    return Engine(engine.model, request.param, backend="kernels", tokenizer=engine.tokenizer)


def alone(runner, begin, *, slots, capacity):
    """What a search finds by itself."""
    return together(runner, [Search(slots, capacity, begin)], batch_size=slots)[0]


def beams(runner, prompt, *, num_beams, max_new_tokens, **options):
    """What beam search finds."""
    return alone(
        runner,
        lambda lane: beam_search(
            lane, prompt, num_beams=num_beams, max_new_tokens=max_new_tokens, **options
        ),
        slots=num_beams,
        capacity=len(prompt) + max_new_tokens - 1,
    )
