import pytest
import torch

from tiedgpt import GPT, GPTConfig
from tiedgpt.heads import (
    FeatureExtractor,
    MultipleChoice,
    SequenceClassifier,
    SpanFinder,
    TokenClassifier,
)

SHAPE = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
OPTIONS = {
    SequenceClassifier: {"labels": ["bad", "so-so", "good"]},
    TokenClassifier: {"labels": ["O", "PERSON", "PLACE"]},
    MultipleChoice: {},
    SpanFinder: {},
    FeatureExtractor: {},
}


def large(model):
    """Give a model weights that are large enough for mistakes to show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def make():
    """Make a head of a kind on a body."""

    def made(kind, *, norm="pre", tied=True, **options):
        torch.manual_seed(4)
        config = GPTConfig(**SHAPE, norm=norm, tie_word_embeddings=tied, eos_token_id=96)
        return large(kind(GPT(config), **(OPTIONS[kind] | options)))

    return made
