"""The models that are compared: tied and untied GPTs, and a tied LSTM, from equal beginnings.

Only the tie differs where shapes allow it. The untied GPT begins as a copy of the tied one: its
head is a copy of `wte`, so both compute the same function before the first step, and whatever
differs afterwards comes from the two gradients being added up or not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.tie import untie

NAMES = {
    "tied": "GPT, tied",
    "untied": "GPT, untied",
    "untied-equal": "GPT, untied, of equal size",
    "lstm": "LSTM, tied",
}
"""The models, and what people call them; the GPTs come first."""
LSTM_SCALE = 5.0
"""The LSTM's first W is the GPT's times this, of a standard deviation of 0.1. It has no norm that
scales up what is read, and with 0.02 it predicted the frequencies alone for half of a training."""


class TiedLSTM(nn.Module):
    """A recurrent language model whose W (V, D) reads and predicts.

    Weight tying comes from such models (Inan et al. 2017, arXiv 1611.01462; Press and Wolf 2017,
    arXiv 1608.05859). Two layers of H units read the rows of W. A linear layer brings their state
    from H to D, as in Press and Wolf, section 3.3, and W predicts.
    """

    def __init__(self, vocab_size: int, n_embd: int, hidden: int) -> None:
        super().__init__()
        self.wte = TiedEmbedding(vocab_size, n_embd)
        self.lstm = nn.LSTM(n_embd, hidden, num_layers=2, batch_first=True)
        self.proj = nn.Linear(hidden, n_embd)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V), each row of ids from a state of zeros."""
        return self.wte.unembed(self.proj(self.lstm(self.wte(ids))[0]))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets (B, T) that are not -100."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def get_output_embeddings(self) -> nn.Module:
        """Return the module that predicts, by the name that transformers gave this method."""
        return self.wte


Model = GPT | TiedLSTM


def build(name: str, config: GPTConfig, seed: int) -> Model:
    """Return a model with its first weights; `config` is the tied GPT's.

    With one seed, the tied and the untied GPT have equal weights and the LSTM has the same W. The
    GPT of equal size has other shapes, and so weights of its own. Torch's global random stream is
    left where it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gpt = GPT(equal_size(config) if name == "untied-equal" else config)
        if name == "lstm":
            lstm = TiedLSTM(config.vocab_size, config.n_embd, lstm_units(config))
            with torch.no_grad():
                lstm.wte.weight.copy_(LSTM_SCALE * gpt.wte.weight)
            return lstm
    if name != "tied":
        untie(gpt)
    return gpt


def equal_size(config: GPTConfig) -> GPTConfig:
    """Return the shape, narrower, whose untied GPT has as many parameters as the tied one.

    The width is the multiple of `n_head` that comes nearest; the MLP makes up for the rest.
    """

    def missing(made: GPTConfig) -> int:
        untied = replace(made, tie_word_embeddings=False)
        return config.parameter_count() - untied.parameter_count()

    widths = range(config.n_head, config.n_embd + 1, config.n_head)
    shapes = [replace(config, n_embd=width) for width in widths]
    narrow = min(shapes, key=lambda made: abs(missing(made)))
    more = round(missing(narrow) / (config.n_layer * (2 * narrow.n_embd + 1)))
    return replace(narrow, n_inner=max(1, narrow.inner_dim + more))


def lstm_units(config: GPTConfig) -> int:
    """Return H with which a `TiedLSTM` has as many parameters as the tied GPT of this shape."""
    vocab, width = config.vocab_size, config.n_embd

    def parameters(units: int) -> int:
        return vocab * width + 12 * units**2 + (5 * width + 16) * units + width

    return min(range(1, 4 * width), key=lambda h: abs(config.parameter_count() - parameters(h)))


def matrices(model: Model) -> dict[str, Tensor]:
    """Return each matrix (V, D) by what it does."""
    reads, head = model.wte.weight.detach(), getattr(model, "head", None)
    if head is None:
        return {"reads and predicts": reads}
    return {"reads": reads, "predicts": head.weight.detach()}
