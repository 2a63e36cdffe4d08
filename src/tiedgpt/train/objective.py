"""An objective: a model with its loss, its score, and how it is shown and published.

    class Mine(Objective):
        def build(self): return GPT(self.config)
        def score(self, model, batches, autocast): return MyScore(nats=...)

    data = Data(batches=..., held_out=...)  # train/dataset.py
    for event in Trainer(RunDirectory(path), Mine(config), data, plan, device).run(): ...

A batch is a tuple of arrays of any dtype, a row an example. A loss reports the number of its
targets (`n_targets`), so the losses of micro-batches add up to that of the batch.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
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
from tiedgpt.train.planning import Plan
from tiedgpt.weights.formats.transformers.writer import save_tokenizer
from tiedgpt.weights.gpt import to_gpt
from tiedgpt.weights.sources import open_checkpoint
from tiedgpt.weights.wrappers import OTHER_HEADS

if TYPE_CHECKING:
    from tiedgpt.train.dataset import Data, Sources
    from tiedgpt.train.optim.groups import Group
    from tiedgpt.train.options import TrainOptions
    from tiedgpt.train.storage import RunDirectory

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
    """The loss that a GPT or a head has by itself; base of every objective."""

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


class Pretrained:
    """The GPT at a SOURCE, without a head other than that over the vocabulary."""

    def __init__(self, source: str, *, keep_head: bool, n_tokens: int = 0) -> None:
        self.source, self.keep_head, self.n_tokens = source, keep_head, n_tokens

    @functools.cached_property
    def gpt(self) -> GPT:
        """The model in fp32, with new rows if it has fewer than `n_tokens`."""
        gpt = load_body(self.source, dtype=torch.float32, keep_head=self.keep_head)
        if (n_new := self.n_tokens - gpt.config.vocab_size) > 0:
            add_tokens(gpt, n_new)
        return gpt

    @property
    def n_positions(self) -> int:
        """Number of positions of the model, from the header of its file."""
        tensors = to_gpt(open_checkpoint(self.source)).tensors
        if "wpe.weight" not in tensors:
            return self.gpt.config.n_positions  # raises the error about what is missing
        return tensors["wpe.weight"].shape[0]

    def notes(self) -> list[str]:
        """Return a note on the source's head, if it has another than that over the vocabulary."""
        names = open_checkpoint(self.source).tensors
        heads = [name for name in names if name.startswith(OTHER_HEADS)]
        if not heads:
            return []
        return [f"{self.source} has a trained head ({', '.join(heads)}), which is not used"]

    def put_into(self, gpt: GPT) -> None:
        """Move its weights into a model of its shape; they are not kept here."""
        state, expected = self.gpt.state_dict(), gpt.state_dict()
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in expected.items()}:
            raise UserError(
                f"{self.source} is another model than when this run began",
                hint="give another --out",
            )
        gpt.load_state_dict(state)
        del self.gpt


class Score(Protocol):
    """The result of an evaluation."""

    @property
    def nats(self) -> float:
        """The mean loss."""


class ModelSetup(NamedTuple):
    """The first fields of every objective, in their order."""

    config: GPTConfig
    tokenizer: Tokenizer
    start: Pretrained | None = None
    frozen: str = ""


@dataclass(frozen=True, kw_only=True)
class Showcase:
    """Samples of a published model, and what to do with it next."""

    samples: Sequence[tuple[str, str]] = ()
    """Titles and texts."""
    accuracy: str = ""
    """How often the model is right, in words."""
    commands: Sequence[str] = ()
    """Further commands of `tiedgpt`."""
    python: str = ""
    """Code that uses the model."""


@dataclass(eq=False)
class Objective(Loss, ABC):
    """A model, its loss, and how it is scored, shown and published.

    `loss` and `n_targets` (see `Loss`) may be overridden, too.
    """

    config: GPTConfig
    """Config of the body."""
    tokenizer: Tokenizer | None = None
    start: Pretrained | None = None
    """The model to start from."""
    frozen: str = ""
    """Patterns of frozen parameters (`--freeze`)."""
    keeps_head: ClassVar[bool] = True
    """Whether the head over the vocabulary of a model to start from is needed."""

    @classmethod
    def open(cls, options: TrainOptions) -> Sources:
        """Read the data of the options."""
        raise UserError(
            f"{cls.__name__} lacks open, which reads its data",
            hint="define the classmethods open(options) and make(sources, run, options, setup)",
        )

    @classmethod
    def make(
        cls, sources: Any, run: RunDirectory, options: TrainOptions, setup: ModelSetup
    ) -> tuple[Self, Data]:
        """Return the objective, and the rows of the sources from `open`."""
        raise UserError(
            f"{cls.__name__} lacks make, which returns the objective and its data",
            hint="define the classmethod make(sources, run, options, setup)",
        )

    @abstractmethod
    def build(self) -> Any:
        """Return the model with fresh weights, drawn from torch's global stream."""

    @abstractmethod
    def score(self, model: Any, batches: Iterable[Arrays], autocast: torch.dtype | None) -> Score:
        """Score a model on held-out batches."""

    def begin(self, model: Model) -> None:
        """Before the first step: put the weights of `start` into the body."""
        if self.start is not None:
            self.start.put_into(body_of(model))

    def parameter_groups(self, model: Model, plan: Plan) -> list[Group]:
        """Return the optimizer groups: every parameter that requires a gradient, once."""
        from tiedgpt.train.optim.groups import parameter_groups

        decay = plan.weight_decay
        return parameter_groups(model, matrices=plan.optimizer, weight_decay=decay)

    def state_to_save(self, model: Model) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint holds, by name.

        `build` must make all other tensors, the same each time.
        """
        return dict(model.named_parameters())

    def metrics(self, score: Any) -> dict[str, float]:
        """Return a score's numbers for metrics.jsonl, with names that begin with `val_`."""
        return {"val_loss": score.nats}

    def sample(self, model: Any, data: Any, step: int, seed: int) -> str:
        """Return a sample of the model's output, without drawing from torch's global stream."""
        return ""

    def describe(self, config: GPTConfig) -> str:
        """Describe the matrix or head that predicts in a model of this config."""
        return f"trained as {type(self).__name__}"

    @property
    def transformers_class(self) -> str | None:
        """The class of transformers that loads the published model, or None."""
        return None

    def show(self, directory: RunDirectory, data: Any, options: TrainOptions) -> Showcase:
        """Return samples of the published model and the next commands."""
        return Showcase()

    def publish(self, model: Any, directory: Path) -> None:
        """Write the model as a Hugging Face directory, with its tokenizer."""
        model.save_pretrained(directory)
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, body_of(model).config, directory)


def check_result(objective: type, method: str, result: Any, expected: str, is_valid: bool) -> None:
    """Raise `UserError` if a method of an objective returned something else than `expected`."""
    if not is_valid:
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        actual = "None" if result is None else f"a {type(result).__name__}{shape}"
        raise UserError(f"{objective.__name__}.{method} must return {expected}, not {actual}")


def try_objective(objective: Objective, data: Data, device: torch.device) -> None:
    """Build a model, compute a loss and a score; raise `UserError` for an invalid result."""
    check = functools.partial(check_result, type(objective))
    model = objective.build()
    is_model = isinstance(getattr(model, "gpt", model), GPT)
    check("build", model, "a GPT or a module with one as gpt", is_model)
    objective.begin(model.train())
    model.to(device)
    for name in ("batches", "held_out"):
        function = getattr(data, name)
        check("make", function, f"data whose {name} is a function", callable(function))
    rows = tuple(array[:1] for array in data.batches(1, 0)(0))
    others = [array for array in rows if not isinstance(array, np.ndarray)]
    check("make", (*others, rows)[0], "data whose batches are tuples of NumPy arrays", not others)
    loss, counts = objective.loss(model, on_device(rows, device)), objective.n_targets(rows)
    check("n_targets", counts, "a tuple of integers", isinstance(counts, tuple | list))
    terms = loss if isinstance(loss, tuple) else (loss,)
    are_terms = len(terms) == len(counts) and all(
        isinstance(term, Tensor) and term.shape == () and (term.requires_grad or count == 0)
        for term, count in zip(terms, counts, strict=True)
    )
    check("loss", loss, "a scalar tensor with a gradient, or one for each of n_targets", are_terms)
    held_out = [*data.held_out(1, 1)]
    if not held_out:
        raise UserError(f"{type(objective).__name__}.make must return data with a held-out batch")
    score = objective.score(model, held_out, None)
    is_score = isinstance(getattr(score, "nats", None), float | int)
    check("score", score, "an object whose nats is the mean loss, a float", is_score)
