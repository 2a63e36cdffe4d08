"""The loss of a model on a batch, as a step needs it; a task is one.

A batch is a tuple of arrays of any dtype, a row an example. A loss reports the number of its
targets (`n_targets`), so the losses of micro-batches add up to that of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.heads import Head

Model = nn.Module
"""A GPT, or a module that has one as `gpt`."""
Arrays = tuple[NDArray[Any], ...]


def body_of(model: Model) -> GPT:
    """Return the GPT, or the one under a head."""
    gpt = model if isinstance(model, GPT) else model.gpt
    assert isinstance(gpt, GPT)
    return gpt


def predicts_tokens(model: Model) -> bool:
    """Return whether a model predicts tokens of the vocabulary."""
    return isinstance(model, GPT) or bool(getattr(model, "predicts_tokens", False))


def on_device(batch: Arrays, device: torch.device) -> tuple[Tensor, ...]:
    """Return a batch as tensors."""
    return tuple(torch.from_numpy(array).to(device) for array in batch)


class Loss:
    """The loss that a GPT or a head has by itself; base of every task."""

    def loss(self, model: Any, batch: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Return the mean loss (), or several means that add up to it; see `n_targets`."""
        return model.losses(*batch) if isinstance(model, Head) else model.loss(*batch)

    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return the number of targets in some rows, for each term of the loss.

        A term is the mean over its targets. By default, they are the values of the batch's last
        array that are not -100, or the rows of an array of floats.
        """
        last = batch[-1]
        return (int((last != IGNORED).sum()) if last.dtype.kind in "iu" else len(last),)


OWN_LOSS = Loss()


class LossModule(nn.Module):
    """The loss of a model as a module, so that it runs inside a forward.

    DDP and FSDP2 hook into the forward of the module that they wrap: DDP arranges there that
    gradients are averaged, FSDP2 gathers the sharded weights there. Calling the loss of the inner
    module (`ddp.module.loss`) would leave gradients unsynchronised without an error, and mix shards
    with whole tensors.

        objective = LossModule(model)
        for block in model.h: fully_shard(block)     # or: wrapped = DDP(objective)
        fully_shard(objective)                       # W is gathered here, for both its uses
        objective(ids, targets).backward()
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, *batch: Tensor, objective: Loss = OWN_LOSS, shares: Sequence[float] | None = None
    ) -> Tensor:
        """Return the loss (), in nats, by an objective or by the model's own.

        With `shares`, return the contribution of these rows to the loss of their batch: the sum of
        each term times its share. A term with a share of 0 is left out, unless all shares are 0.
        """
        loss = objective.loss(self.model, batch)
        terms = loss if isinstance(loss, tuple) else (loss,)
        weights = shares or [1.0] * len(terms)
        summands = [t * w for t, w in zip(terms, weights, strict=True) if w or not any(weights)]
        return torch.stack(summands).sum() if len(summands) > 1 else summands[0]
