"""The loss as a module, so that it runs inside a forward.

DDP and FSDP2 hook into the forward of the module that they wrap: DDP arranges there that gradients
are averaged, FSDP2 gathers the sharded weights there. A loss called past it (`ddp.module.loss`)
would leave gradients unsynchronised without a word, and mix shards with whole tensors.

    objective = Objective(model)
    for block in model.h: fully_shard(block)     # or: wrapped = DDP(objective)
    fully_shard(objective)                       # W is gathered here, for both its uses
    objective(ids, targets).backward()
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tiedgpt.train.task import Model, counts, loss_terms


class Objective(nn.Module):
    """The loss of a GPT or of a head: forward(ids, targets) is `model.loss(ids, targets)`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor, whole: Sequence[Tensor] | None = None) -> Tensor:
        """Return the loss, (), in nats, of what `model.loss` takes: of a GPT ids and targets.

        With `whole`, a batch of which this one is a part, it is what the part adds to the loss of
        that: each mean times the part's share of its targets. Over several processes the mean of
        their gradients is that of the whole batch if each loss is times their number.
        """
        if whole is None:
            return self.model.loss(*batch)
        terms = loss_terms(self.model, batch)
        shares = (n / m for n, m in zip(counts(terms, batch), counts(terms, whole), strict=True))
        loss = sum(mean * share for mean, share in zip(terms, shares, strict=True))
        assert isinstance(loss, Tensor)
        return loss
