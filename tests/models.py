"""Tiny models that the tests make themselves, and the settings of processes that use them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import settings
from tokenizers import pre_tokenizers

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.train import speed
from tiedgpt.train.tasks import published_text

# Speed is bench/'s business; on a build machine every run draws the same examples.
settings.register_profile("tiedgpt", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tiedgpt")
torch.set_num_threads(1)  # tiny models are slower in parallel, and other work shares the cores
os.fsync = os.fstat  # what a killed process has written stays; a run syncs hundreds of times
published_text.ACCURACY_TOKENS = 100  # each training of a test ends with scoring them
speed.MAX_MEASURE_SECONDS = 0.1  # before a training by the clock; four steps at least
TINY = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}


@pytest.fixture
def tiny_config() -> GPTConfig:
    return GPTConfig(**TINY)


def random_gpt(seed: int = 7, std: float = 0.2, **fields) -> GPT:
    """Return a model of `TINY` sizes whose weights are large enough that mistakes show."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**TINY, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, std)
    return model


@pytest.fixture
def tiny() -> GPT:
    return random_gpt()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (3, 24), generator=torch.Generator().manual_seed(3))


def kept_for_backward(module: torch.nn.Module, compute: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps for the backward pass beside the parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(saved[at].untyped_storage().nbytes() for at in saved.keys() - weights)


TEXT = "the cat sat on the mat. the dog ate the hat — naïve café, 日本語. " * 20


def opinionated(tokenizer: Tokenizer, n_positions: int = 48, n_unnamed: int = 0) -> GPT:
    """Return a model on random weights strong enough to have opinions.

    Its last `n_unnamed` ids have no token.
    """
    torch.manual_seed(5)
    config = GPTConfig(
        vocab_size=len(tokenizer) + n_unnamed, n_positions=n_positions, n_embd=32, n_layer=2,
        n_head=2, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def save_model(path: Path, model: GPT, tokenizer: Tokenizer) -> Path:
    """Write the model and its tokenizer to a directory."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an opinionated model and its tokenizer, which no test changes."""
    tokenizer = Tokenizer.train([TEXT], 300)
    return save_model(tmp_path_factory.mktemp("model"), opinionated(tokenizer), tokenizer)


@pytest.fixture(scope="session")
def exploding(directory: Path) -> tuple[Tokenizer, str]:
    """The model's tokenizer with a regular expression of exponential time, and a text for it."""
    rust = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    expression = tokenizers.Regex("(a|aa|a*)+$")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(expression, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return Tokenizer(rust), "a" * 100 + "b"
