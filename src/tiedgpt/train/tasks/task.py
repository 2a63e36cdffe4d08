"""Tasks: data, model, loss and score of a run.

    class Mine(Task):
        def read(self): return MySources(self.options.data)
        def build(self, config, data): return GPT(config)
        def measure(self, model, data, batch): return [loss of the batch * n, n]
        def score(self, data, sums): return Score(sums[0] / sums[1])

A batch is a tuple of arrays of any dtype, a row an example. A loss reports the number of its
targets (`n_targets`), so the losses of micro-batches add up to that of the batch.
"""

from __future__ import annotations

import functools
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import ExampleReader, documents
from tiedgpt.data.prepare import is_prepared
from tiedgpt.errors import UserError
from tiedgpt.heads.head import load_body
from tiedgpt.text import Tokenizer
from tiedgpt.tie import add_tokens
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.options import TrainOptions, TuneOptions
from tiedgpt.train.step.loss import Loss, Model, body_of, on_device
from tiedgpt.train.tasks.publisher import Publisher
from tiedgpt.train.tasks.registry import TASKS
from tiedgpt.train.tasks.rows import Data, Sources
from tiedgpt.weights.source import Source
from tiedgpt.weights.wrappers import OTHER_HEADS


@dataclass(frozen=True)
class Score:
    """The result of an evaluation; other numbers are fields of a subclass."""

    nats: float
    """Mean loss."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers for metrics.jsonl, with names that begin with `val_`."""
        return {f"val_{'loss' if k == 'nats' else k}": value for k, value in asdict(self).items()}


class Pretrained:
    """The GPT at a SOURCE, without a head other than that over the vocabulary."""

    def __init__(self, source: str, *, keep_head: bool) -> None:
        self.source, self.keep_head = Source(source), keep_head

    @functools.cached_property
    def gpt(self) -> GPT:
        """The model in fp32."""
        return load_body(self.source, dtype=torch.float32, keep_head=self.keep_head)

    @property
    def n_positions(self) -> int:
        """Number of positions of the model, from the header of its file."""
        tensors = self.source.gpt.tensors
        if "wpe.weight" not in tensors:
            return self.gpt.config.n_positions  # raises the error about what is missing
        return tensors["wpe.weight"].shape[0]

    def notes(self) -> list[str]:
        """Return a note on the source's head, if it has another than that over the vocabulary."""
        names = self.source.checkpoint.tensors
        heads = [name for name in names if name.startswith(OTHER_HEADS)]
        if not heads:
            return []
        return [f"{self.source} has a trained head ({', '.join(heads)}), which is not used"]

    def put_into(self, gpt: GPT) -> None:
        """Move its weights into a model of its shape, with new rows if that has more tokens.

        They are not kept here.
        """
        if (n_new := gpt.config.vocab_size - self.gpt.config.vocab_size) > 0:
            add_tokens(self.gpt, n_new)
        state, expected = self.gpt.state_dict(), gpt.state_dict()
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in expected.items()}:
            raise UserError(
                f"{self.source} is another model than when this run began",
                hint="give another --out",
            )
        gpt.load_state_dict(state)
        del self.gpt


class Task(Loss, ABC):
    """The data, the model, the loss and the score of a run, by its options.

    `loss` and `n_targets` (see `Loss`) may be overridden, too. A task has no state of a run: what
    depends on the data comes with the `Data`.
    """

    keeps_head: ClassVar[bool] = True
    """Whether the head over the vocabulary of a model to start from is needed."""
    saves_frozen: bool = True
    """Whether a checkpoint holds frozen parameters; else `build` must make them again."""

    def __init__(self, options: RunOptions | None = None) -> None:
        self.options: RunOptions = TrainOptions() if options is None else options

    @functools.cached_property
    def start(self) -> Pretrained | None:
        """The model to start from."""
        source = self.options.start
        return None if source is None else Pretrained(source, keep_head=self.keeps_head)

    @functools.cached_property
    def tokenizer_source(self) -> Source | None:
        """The source of the tokenizer, if the options name one."""
        name = self.options.tokenizer_source
        if name is None or name == "char":
            return None
        if self.start is not None and name == self.options.start:
            return self.start.source
        return Source(name, weights=False)

    def read(self) -> Sources:
        """Read the data of the options."""
        raise UserError(
            f"{type(self).__name__} lacks read, which reads its data",
            hint="define read(self), which returns a subclass of Sources",
        )

    @abstractmethod
    def build(self, config: GPTConfig, data: Data) -> Any:
        """Return the model with fresh weights, drawn from torch's global stream.

        `config` is that of the body. For `--freeze`, freeze `options.freeze`.
        """

    def begin(self, model: Model, data: Data) -> None:
        """Before the first step: put the weights of `start` into the body."""
        if self.start is not None:
            self.start.put_into(body_of(model))

    @abstractmethod
    def measure(self, model: Any, data: Data, batch: tuple[Tensor, ...]) -> Sequence[float]:
        """Return numbers about a held-out batch whose sums over batches make the score."""

    @abstractmethod
    def score(self, data: Data, sums: Sequence[float]) -> Score:
        """Return the score of the sums of `measure`."""

    def sample(self, model: Any, data: Any, step: int, seed: int) -> str:
        """Return a sample of the model's output, without drawing from torch's global stream."""
        return ""

    def publisher(self, config: GPTConfig, data: Any) -> Publisher:
        """Return what shows and writes the trained model."""
        return Publisher(config, data.tokenizer, type(self).__name__)


def open_task(options: RunOptions) -> Task:
    """Return the task of these options; for `tune`, the data decide."""
    if isinstance(options, TuneOptions):
        if options.start is None:
            raise UserError("name the model to tune: --from MODEL")
        examples = has_examples(options)
        options.check_data(examples=examples)
        return load_task(TASKS["replies" if examples else "lm"].home)(options)
    assert isinstance(options, TrainOptions)
    return load_task(options.task_record.home)(options)


def has_examples(options: TuneOptions) -> bool:
    """Return whether the data are examples with replies; `CorruptInputError` for other records."""
    if is_prepared(options.data):
        return False
    if options.packing == "on":
        return True
    corpus = documents(options.data, **options.file_reading)
    of_text = options.text_field != TuneOptions.text_field
    if of_text or not corpus.has_records:
        return False
    reader = ExampleReader(corpus, Tokenizer.characters(["a"]), skip_bad=options.skip_bad)
    return reader.kind != "text"


def load_task(home: str) -> type[Task]:
    """Import the class MODULE:CLASS, of an installed module or of one in the working directory."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    module, _, name = home.partition(":")
    try:
        task = getattr(import_module(module), name)
    except Exception as error:  # the module may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
        line = f", in line {inside[0].lineno} of {inside[0].filename}" if inside else ""
        remedy = "give MODULE:CLASS of a file in this directory, as --objective my_module:Mine"
        raise UserError(
            f"the objective {home!r} cannot be imported: {type(error).__name__}: {error}{line}",
            hint=None if line or isinstance(error, SyntaxError) else remedy,
        ) from error
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise UserError(
            f"{home} is not a subclass of Task", hint="derive it from tiedgpt.train.tasks.task.Task"
        )
    if missing := ", ".join(sorted(task.__abstractmethods__)):
        raise UserError(f"{home} must define {missing}")
    return task


def try_task(task: Task, config: GPTConfig, data: Data, device: torch.device) -> None:
    """Build a model, compute a loss and a score; raise `UserError` for an invalid result."""
    model = task.build(config, data)
    if not isinstance(getattr(model, "gpt", model), GPT):
        raise _wrong_result(task, "build", model, "a GPT or a module with one as gpt")
    task.begin(model.train(), data)
    model.to(device)
    rows = tuple(array[:1] for array in data.batches(1, 0)(0))
    if others := [array for array in rows if not isinstance(array, np.ndarray)]:
        raise _wrong_result(task, "read", others[0], "sources of batches of NumPy arrays")
    loss, counts = task.loss(model, on_device(rows, device)), task.n_targets(rows)
    terms = loss if isinstance(loss, tuple) else (loss,)
    is_counted = isinstance(counts, tuple | list) and len(counts) == len(terms)
    if not is_counted:
        raise _wrong_result(task, "n_targets", counts, f"a tuple of {len(terms)} integers")
    for term, count in zip(terms, counts, strict=True):
        is_tensor = isinstance(term, Tensor) and term.shape == ()
        if not is_tensor or not (term.requires_grad or count == 0):
            raise _wrong_result(task, "loss", term, "a scalar tensor with a gradient, or several")
    held_out = next(iter(data.held_out(1, 1)), None)
    if held_out is None:
        raise _wrong_result(task, "read", held_out, "sources with a held-out batch")
    with torch.no_grad():
        score = task.score(data, task.measure(model.eval(), data, on_device(held_out, device)))
    if not isinstance(score, Score) or not isinstance(score.nats, float | int):
        raise _wrong_result(task, "score", getattr(score, "nats", score), "a Score, nats a float")


def _wrong_result(task: Task, method: str, result: Any, expected: str) -> UserError:
    """Return the error for a method that returned something else than `expected`."""
    shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
    actual = "None" if result is None else f"a {type(result).__name__}{shape}"
    return UserError(f"{type(task).__name__}.{method} must return {expected}, not {actual}")
