"""What a run trains, and on what: everything in which one run differs from another.

The trainer knows a `Task` and nothing of text, labels or heads. A batch is a tuple of
int64 arrays, a row an example; the last ones are the answers, one for each term of the loss, in
which -100 is not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.heads import Head
from tiedgpt.text import Tokenizer
from tiedgpt.weights.save import save_tokenizer

if TYPE_CHECKING:
    from tiedgpt.train.plan import Plan
    from tiedgpt.train.sources import Pretrained

Model = GPT | Head
Arrays = tuple[NDArray[np.int64], ...]


class Score(Protocol):
    """How good a model is on what is held out."""

    @property
    def nats(self) -> float:
        """The mean loss."""


class Task(ABC):
    """A model and its data. Batches are pure functions of (seed, step), so that a run resumes.

    `config` is the body's; `start` is the trained GPT from which a run starts, if any.
    """

    unit: str
    """What is counted: tokens, examples."""
    row_units: int
    """Units in a row of a batch."""
    row_tokens: int
    """Tokens in the longest row, by which a row's memory is judged."""
    epoch_rows: int | None
    """Rows of an epoch, where epochs are what one counts in."""
    held_out_rows: float
    """Rows that the last evaluation takes."""
    counted: dict[str, dict[str, Any]]
    """Tables of run.toml that tell what the data hold."""
    notes: list[str]
    """What is worth telling of the data."""

    def __init__(
        self,
        config: GPTConfig,
        tokenizer: Tokenizer,
        context: int | None,
        start: Pretrained | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.context = context or config.n_positions
        self.start = start
        self.counted = {}
        self.notes = []

    @abstractmethod
    def build(self) -> Model:
        """Return the model with fresh weights, drawn from torch's global stream."""

    def begin(self, model: Model) -> None:
        """Before the first step: put the weights of `start` into the body."""
        if self.start is not None:
            self.start.put_into(body_of(model))

    @abstractmethod
    def batches(self, plan: Plan) -> Callable[[int], Arrays]:
        """Return the batch of each step, from 0."""

    @abstractmethod
    def evaluate(self, model: Model, plan: Plan, n_batches: int | None = None) -> Score:
        """Score what is held out: the first batches of it, or all, as `held_out_rows` says."""

    @abstractmethod
    def metrics(self, score: Any) -> dict[str, float]:
        """Return a score as it stands in metrics.jsonl."""

    @abstractmethod
    def sample(self, model: Model, plan: Plan, step: int) -> str:
        """Return something that shows what the model does now; no random stream is touched."""

    def publish(self, model: Model, directory: Path) -> None:
        """Write the model as others load it, and the tokenizer."""
        model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, body_of(model).config, directory)


def body_of(model: Model) -> GPT:
    """Return the GPT, or the one under a head."""
    return model if isinstance(model, GPT) else model.gpt


def predicts_tokens(model: Model) -> bool:
    """Whether tokens are scored, by W or by a head of its own."""
    return isinstance(model, GPT) or model.predicts_tokens


def on_device(batch: Arrays, device: torch.device) -> tuple[Tensor, ...]:
    """Return a batch as tensors."""
    return tuple(torch.from_numpy(array).to(device) for array in batch)


def loss_terms(model: Model, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the means that add up to the loss, one for each array of answers."""
    if isinstance(model, GPT):
        ids, targets = batch
        return (model.loss(ids, targets),)
    return model.losses(*batch)


def counts(terms: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
    """Return how many answers each term is the mean of."""
    return [(answers != IGNORED).sum() for answers in batch[len(batch) - len(terms) :]]


class Objective(nn.Module):
    """The loss of a GPT or of a head as a module, so that it runs inside a forward.

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
