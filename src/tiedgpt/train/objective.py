"""What is minimised: the means of a batch, computed in parts, on one process or on several.

A batch is a tuple of arrays of any dtype, a row an example. The trainer knows no more of it: a loss
says what it is the mean of, and by that the parts of a batch add up to the whole.
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
    gpt = getattr(model, "gpt", model)
    assert isinstance(gpt, GPT)
    return gpt


def predicts_tokens(model: Model) -> bool:
    """Whether tokens are scored, by W or by a head of its own."""
    return bool(getattr(model, "predicts_tokens", isinstance(model, GPT)))


def on_device(batch: Arrays, device: torch.device) -> tuple[Tensor, ...]:
    """Return a batch as tensors."""
    return tuple(torch.from_numpy(array).to(device) for array in batch)


class Loss:
    """The loss that a GPT or a head has by itself; base of every task."""

    def loss(self, model: Any, batch: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Return the mean loss (), or several means that add up to it; see `n_targets`."""
        terms: Tensor | tuple[Tensor, ...]
        terms = model.losses(*batch) if isinstance(model, Head) else model.loss(*batch)
        return terms

    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return how many targets of some rows each term of the loss is the mean of.

        Here, those of the last array that are not -100; of an array of floats its rows.
        """
        last = batch[-1]
        return (int((last != IGNORED).sum()) if last.dtype.kind in "iu" else len(last),)


OWN_LOSS = Loss()


class Objective(nn.Module):
    """The loss of a model as a module, so that it runs inside a forward.

    DDP and FSDP2 hook into the forward of the module that they wrap: DDP arranges there that
    gradients are averaged, FSDP2 gathers the sharded weights there. A loss called past it
    (`ddp.module.loss`) would leave gradients unsynchronised without a word, and mix shards with
    whole tensors.

        objective = Objective(model)
        for block in model.h: fully_shard(block)     # or: wrapped = DDP(objective)
        fully_shard(objective)                       # W is gathered here, for both its uses
        objective(ids, targets).backward()
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, *batch: Tensor, task: Loss = OWN_LOSS, shares: Sequence[float] | None = None
    ) -> Tensor:
        """Return the loss, (), in nats: of a GPT of ids and targets, or of what a task defines.

        With `shares`, it is what rows of a batch add to the loss of the whole: each term times its
        share. A term that the rows have no targets for is left out, unless none has any.
        """
        found = task.loss(self.model, batch)
        terms = found if isinstance(found, tuple) else (found,)
        weights = shares or [1.0] * len(terms)
        kept = [t * w for t, w in zip(terms, weights, strict=True) if w or not any(weights)]
        return torch.stack(kept).sum() if len(kept) > 1 else kept[0]
