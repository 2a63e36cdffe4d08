"""What a run trains, and on what: everything in which one run differs from another.

The trainer knows a `Task` and nothing of text, labels or heads. A task of your own is a class in
your own file: it must build a model, say the batch of each step, and score what is held out. All
else has a default, which suits a GPT or a head on one.

    class Mine(Task):
        def build(self): return GPT(self.config)
        def batches(self, plan): return lambda step: (ids, targets)    # a pure function of step
        def evaluate(self, model, plan, n_batches=None): return MyScore(nats=...)

    for event in Trainer(RunDirectory(path), Mine(config), plan, device).run(): ...

A batch is a tuple of arrays of any dtype, a row an example. The trainer knows no more of it: a loss
says what it is the mean of, and by that the parts of a batch add up to the whole.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads import Head
from tiedgpt.heads.head import load_body
from tiedgpt.text import Tokenizer
from tiedgpt.tie import add_tokens
from tiedgpt.train.plan import Plan
from tiedgpt.weights.checkpoint import to_gpt
from tiedgpt.weights.formats.transformers.writer import save_tokenizer
from tiedgpt.weights.sources import open_checkpoint

if TYPE_CHECKING:
    from tiedgpt.train.optim import Group

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


class LossModule(nn.Module):
    """The loss of a model as a module, so that it runs inside a forward.

    DDP and FSDP2 hook into the forward of the module that they wrap: DDP arranges there that
    gradients are averaged, FSDP2 gathers the sharded weights there. A loss called past it
    (`ddp.module.loss`) would leave gradients unsynchronised without a word, and mix shards with
    whole tensors.

        objective = LossModule(model)
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


class Pretrained:
    """The GPT at a SOURCE; a head on it, other than that over the vocabulary, stays there."""

    def __init__(self, source: str, *, keep_head: bool, n_tokens: int = 0) -> None:
        self.source, self.keep_head, self.n_tokens = source, keep_head, n_tokens

    @functools.cached_property
    def gpt(self) -> GPT:
        """The model, in fp32, read once; with new rows where it has fewer than `n_tokens`."""
        gpt = load_body(self.source, dtype=torch.float32, keep_head=self.keep_head)
        if (n_new := self.n_tokens - gpt.config.vocab_size) > 0:
            add_tokens(gpt, n_new)
        return gpt

    @property
    def n_positions(self) -> int:
        """The positions of the model; no weights are read for it."""
        tensors = to_gpt(open_checkpoint(self.source)).tensors
        if "wpe.weight" not in tensors:
            return self.gpt.config.n_positions  # or rather the error of what is missing
        return tensors["wpe.weight"].shape[0]

    def put_into(self, gpt: GPT) -> None:
        """Copy its weights into a model of its shape, and let go of them."""
        theirs, ours = self.gpt.state_dict(), gpt.state_dict()
        if {n: t.shape for n, t in theirs.items()} != {n: t.shape for n, t in ours.items()}:
            raise UserError(
                f"{self.source} is another model than when this run began",
                hint="give another --out",
            )
        gpt.load_state_dict(theirs)
        del self.gpt


class Score(Protocol):
    """How good a model is on what is held out; `str()` says it to people."""

    @property
    def nats(self) -> float:
        """The mean loss."""


class Task(Loss, ABC):
    """A model, its loss and its data; `config` is the body's.

    `loss` and `n_targets` (see `Loss`) may be overridden, too.
    """

    unit = "examples"
    """What is counted: tokens, examples."""
    row_units = 1
    """Units in a row of a batch."""
    epoch_rows = 1
    """Rows of an epoch."""
    held_out_rows = 0.0
    """Rows that the last evaluation takes."""
    n_examples = 0
    """Examples that are trained on; 0: the data are not examples."""
    n_held_out: float = math.inf
    """Examples that are validated on."""
    text_tokens: int | None = None
    """Tokens of a text to train on; with it the size of a fresh model can be chosen."""

    def __init__(
        self,
        config: GPTConfig,
        tokenizer: Tokenizer | None = None,
        context: int | None = None,
        start: Pretrained | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.context = context or config.n_positions
        self.start = start
        self.frozen = ""
        """What stays as it is (`--freeze`)."""
        self.trained: int | None = None
        """How many parameters are trained; None: all."""
        self.row_tokens = self.context
        """Tokens in the longest row, by which a row's memory is judged."""
        self.counted: dict[str, dict[str, Any]] = {}
        """Tables of run.toml that tell what the data hold."""
        self.notes: list[str] = []
        """What is worth telling of the data."""

    def with_config(self, config: GPTConfig) -> Self:
        """Return this task for a model of another config, with all its positions as context."""
        task = copy.copy(self)
        task.config = config
        task.context = task.row_tokens = config.n_positions
        return task

    @abstractmethod
    def build(self) -> Model:
        """Return the model with fresh weights, drawn from torch's global stream."""

    def begin(self, model: Model) -> None:
        """Before the first step: put the weights of `start` into the body."""
        if self.start is not None:
            self.start.put_into(body_of(model))

    @abstractmethod
    def batches(self, plan: Plan) -> Callable[[int], Arrays]:
        """Return the batch of each step, from 0: a pure function of the step and the seed."""

    @abstractmethod
    def evaluate(self, model: Any, plan: Plan, n_batches: int | None = None) -> Score:
        """Score what is held out: the first batches of it, or all, as `held_out_rows` says."""

    def parameter_groups(self, model: Model, plan: Plan) -> list[Group]:
        """Return what is trained, and how: every parameter that requires a gradient, once."""
        from tiedgpt.train.optim import parameter_groups

        decay = plan.weight_decay
        return parameter_groups(model, matrices=plan.optimizer, weight_decay=decay)

    def state_to_save(self, model: Model) -> Mapping[str, Tensor]:
        """Return the tensors by name that a checkpoint holds; resuming copies them back.

        What is not among them `build` must make again, the same each time.
        """
        return dict(model.named_parameters())

    def metrics(self, score: Any) -> dict[str, float]:
        """Return a score as it stands in metrics.jsonl, under names that begin with `val_`."""
        return {"val_loss": score.nats}

    def sample(self, model: Any, plan: Plan, step: int) -> str:
        """Return something that shows what the model does now; no random stream is touched."""
        return ""

    def describe(self, config: GPTConfig | None = None) -> dict[str, str]:
        """Return what is trained on and what predicts, by short names, for people.

        `config` is the trained model's, which differs from the first where the run unties it.
        """
        return {}

    def vocabulary(self) -> str:
        """Return in words what the tokens are."""
        if self.tokenizer is None:
            return f"a vocabulary of {self.config.vocab_size:,}"
        return f"{self.tokenizer.kind} vocabulary of {len(self.tokenizer):,}"

    def publish(self, model: Any, directory: Path) -> None:
        """Write the model as others load it, and the tokenizer."""
        model.save_pretrained(directory)
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, body_of(model).config, directory)
