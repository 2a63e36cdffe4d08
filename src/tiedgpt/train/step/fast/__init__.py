"""Cheaper training steps, switched on from outside inside a `with` block.

    with fast_training(model):
        model.loss(ids, targets).backward()

Inside the block the model and its layers have other classes (`SUBSTITUTES`), but not their copies.
Each optimization is one file, which states its measured gain. It returns the same value and
gradient as the core, or falls back to the core; only dropout draws other random numbers. Deleting
a file and its line in `SUBSTITUTES` leaves everything working, only slower.

Tried without gain: W's gradient from reading in sparse layout (5 % longer steps), and computing
GELU again in the backward pass (140 MB less for GPT-2 124M at 4 x 512, and 10 % more time).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tiedgpt.core.layers import MLP, Attention
from tiedgpt.core.model import GPT
from tiedgpt.train.step.fast.attention import BlockedAttention
from tiedgpt.train.step.fast.dropout import HashedDropout
from tiedgpt.train.step.fast.gelu import VectorMLP
from tiedgpt.train.step.fast.linear import LeanLinear
from tiedgpt.train.step.fast.loss import OnePassLoss
from tiedgpt.train.step.substitute import Substitute, substitute

SUBSTITUTES: dict[type[nn.Module], type[Substitute]] = {
    Attention: BlockedAttention,
    MLP: VectorMLP,
    nn.Linear: LeanLinear,
    nn.Dropout: HashedDropout,
    GPT: OnePassLoss,
}

__all__ = ["fast_training"]


@contextmanager
def fast_training(model: nn.Module) -> Iterator[None]:
    """Make the training steps of a model cheaper; call forward and backward inside.

    `model` is a GPT, or has one as `gpt`. The model and the layers of its blocks change their class
    inside the `with` block; parametrized, adapted or replaced layers do not change. Inside, second
    derivatives and `torch.func` may raise torch's error, and dropout on a CPU drops other elements
    for the same seed. Raises `UserError` for any other module.
    """
    with substitute(model, SUBSTITUTES):
        yield
