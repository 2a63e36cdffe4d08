import pytest
import torch

from tiedgpt import GPT, GPTConfig
from tiedgpt.heads import FeatureExtractor, MultipleChoice, SequenceClassifier

SHAPE = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
OPTIONS = {
    SequenceClassifier: {"labels": ["bad", "so-so", "good"]},
    MultipleChoice: {},
    FeatureExtractor: {},
}


def enlarge(model):
    """Make the weights of a model large enough for mistakes to show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def make():
    """Return a function that puts a head of a class on a small body."""

    def make_head(head_class, *, norm="pre", tied=True, bias=True, **options):
        torch.manual_seed(4)
        config = GPTConfig(**SHAPE, norm=norm, tie_word_embeddings=tied, bias=bias, eos_token_id=96)
        return enlarge(head_class(GPT(config), **(OPTIONS[head_class] | options)))

    return make_head
