"""Labelled examples as a task: lines of .jsonl in, a head on a GPT's body out.

A line of .jsonl (`parse`) becomes an example; an example (`prepare`) becomes rows of ids with their
answer; rows (`collate`) become a batch of the head's `losses`. `kinds.py` has a class for each kind
of example.
"""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import permutation
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.evaluate.perplexity import totals
from tiedgpt.files import read_json_lines
from tiedgpt.heads import Head, pad
from tiedgpt.text import Tokenizer
from tiedgpt.tie.heads import inference
from tiedgpt.train.objective import Arrays, Pretrained, Task, body_of, on_device
from tiedgpt.train.plan import Plan
from tiedgpt.tune import freeze

HELD_OUT = 10
"""One example in so many is held out."""
MAX_LABELS = 10_000


@dataclass(frozen=True)
class Example:
    """What a line says."""

    texts: tuple[str, ...]
    """What the model reads: one text, or one for each choice."""
    answer: Any = None
    """What is right, unless the only label says it."""
    labels: tuple[str, ...] = ()
    place: str = field(default="", repr=False)
    """File and line."""

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of what it says, wherever it stands."""
        return hashlib.sha256(repr(self).encode()).digest()


@dataclass(frozen=True)
class Row:
    """An example as ids: one row, or one for each choice; and its answer."""

    rows: tuple[list[int], ...]
    answer: NDArray[np.int64]
    cut: bool
    """Whether text was left out because the context is too short for it."""


@dataclass(frozen=True)
class Examples:
    """What is trained on, what is held out, and the names of all labels."""

    train: list[Example]
    held_out: list[Example]
    labels: tuple[str, ...]

    def digest(self) -> str:
        """Return a sha256 of everything, to know changed data by."""
        whole = hashlib.sha256()
        for side in (self.train, self.held_out):
            whole.update(len(side).to_bytes(8, "little") + b"".join(each.digest for each in side))
        return whole.hexdigest()


@dataclass(frozen=True)
class LabelScore:
    """How good a head is on examples that it was not trained on."""

    nats: float
    """The mean loss."""
    share: float
    """Of what was asked, how much was answered rightly."""
    examples: int


class Labelled(Task):
    """Train a head, and the body under it; see `task.Task`."""

    tokenizer: Tokenizer
    fields: ClassVar[str]
    """What a line looks like, for messages."""
    head_class: ClassVar[type[Head]]
    """What is put on the body."""
    use: ClassVar[str]
    """How the trained `head` is asked, in Python."""
    measure: ClassVar[str] = "accuracy"
    """What the share of right answers is called."""

    def __init__(
        self,
        examples: Examples,
        config: GPTConfig,
        tokenizer: Tokenizer,
        *,
        context: int | None = None,
        start: Pretrained | None = None,
    ) -> None:
        super().__init__(config, tokenizer, context, start)
        self.examples = examples
        self.numbers = {name: number for number, name in enumerate(examples.labels)}
        self.train = self._prepare("to train on", examples.train)
        self.held_out = self._prepare("to validate on", examples.held_out)
        self._labels = {"labels": list(examples.labels)} if examples.labels else {}
        self.counted = {
            "train_examples": {"examples": len(self.train), **self._labels},
            "val_examples": {"examples": len(self.held_out)},
        }
        self.epoch_rows = self.n_examples = len(self.train)
        self.n_held_out = len(self.held_out)
        self.held_out_rows = float(len(self.held_out))
        self.row_tokens = max(
            len(row.rows) * max(map(len, row.rows)) for _, row in (*self.train, *self.held_out)
        )

    @staticmethod
    @abstractmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the example that a line holds; `UserError` says what is wrong, not where."""

    @abstractmethod
    def prepare(self, example: Example) -> Row | None:
        """Return its ids and its answer; None where the answer does not fit the context."""

    @abstractmethod
    def said(self, head: Any, example: Example, batch: Sequence[Tensor]) -> str:
        """Return what the head says of an example, which is all of a batch, beside the example."""

    def right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return which answers of a batch the head gives rightly, (n,)."""
        ids, lengths, *_, answers = batch
        return head(ids, lengths).argmax(-1) == answers

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return a batch for the head's `losses`: ids (B, T), lengths (B,), answers (B, ...)."""
        ids, lengths = pad([row.rows[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.int64)

    def _prepare(self, what: str, examples: Sequence[Example]) -> list[tuple[Example, Row]]:
        """Return the examples with their ids; one that cannot be is left out, and noted."""
        made = []
        for example in examples:
            try:
                row = self.prepare(example)
            except UserError as error:
                raise UserError(f"{example.place}: {error}") from None
            if row is not None:
                made.append((example, row))
        total, left_out = len(examples), len(examples) - len(made)
        if not made:
            raise UserError(
                f"no example {what} fits a context of {self.context} tokens",
                hint="give a longer --context",
            )
        if left_out:
            self.notes.append(
                f"left out {left_out:,} of {total:,} examples {what}: their answer does not "
                f"fit {self.context} tokens"
            )
        if cut := sum(row.cut for _, row in made):
            self.notes.append(f"cut {cut:,} of {total:,} examples {what} to {self.context} tokens")
        return made

    def build(self) -> Head:
        """Return a fresh head on a fresh body."""
        make: Callable[..., Head] = self.head_class
        head = make(GPT(self.config), **self._labels)
        freeze(head, self.frozen)
        return head

    def batches(self, plan: Plan) -> Callable[[int], Arrays]:
        """Return the batch of each step; an epoch visits every example once, in its own order."""
        n = len(self.train)
        order = functools.lru_cache(2)(lambda epoch: permutation(n, seed=plan.seed, epoch=epoch))

        def batch(step: int) -> Arrays:
            first = step * plan.batch_size
            places = (divmod(row, n) for row in range(first, first + plan.batch_size))
            return self.collate([self.train[order(e)[i]][1] for e, i in places])

        return batch

    def evaluate(self, model: Head, plan: Plan, n_batches: int | None = None) -> LabelScore:
        """Score the examples held out, by loss and by how many are right."""
        size = plan.micro_batch
        rows = [row for _, row in self.held_out]
        rows = rows if n_batches is None else rows[: n_batches * size]
        batches = (self.collate(rows[at : at + size]) for at in range(0, len(rows), size))

        def measure(batch: tuple[Tensor, ...]) -> list[float]:
            terms, right = model.losses(*batch), self.right(model, batch)
            found = [float(right.sum()), float(len(right))]
            counts = self.n_targets(tuple(tensor.cpu().numpy() for tensor in batch))
            for mean, n in zip(terms, counts, strict=True):
                found += [float(mean) * n, float(n)]
            return found

        right, asked, *sums = totals(model, batches, measure, autocast=plan.autocast)
        nats = sum(loss / n for loss, n in zip(sums[::2], sums[1::2], strict=True))
        return LabelScore(nats, right / asked, len(rows))

    def metrics(self, score: LabelScore) -> dict[str, float]:
        """Return the loss and the share of right answers."""
        return {"val_loss": score.nats, f"val_{self.measure.replace(' ', '_')}": score.share}

    @torch.no_grad()
    def sample(self, model: Head, plan: Plan, step: int) -> str:
        """Return what the head says of an example held out, of another one at each step."""
        example, row = self.held_out[step % len(self.held_out)]
        batch = on_device(self.collate([row]), body_of(model).wte.weight.device)
        with inference(model):
            verdict = "rightly" if self.right(model, batch).all() else "wrongly"
            return f"{verdict} {self.said(model, example, batch)}"

    def describe(self, config: GPTConfig | None = None) -> dict[str, str]:
        """Return how many examples there are, of what, and what scores them."""
        longest = max(len(ids) for _, row in self.train for ids in row.rows)
        labels = f"; {len(names)} labels" if (names := self.examples.labels) else ""
        return {
            "examples": f"{len(self.train):,}; {len(self.held_out):,} more to validate on{labels}",
            "tokens": f"{self.vocabulary()}, the longest row has {longest:,}",
            "predicts": f"a {self.head_class.__name__} on the states of the body",
        }


def read_examples(
    kind: type[Labelled], sources: Sequence[str], validation: str | None = None
) -> Examples:
    """Read lines of .jsonl; without `validation` a tenth of them is held out, by what they say.

    Equal lines are on the same side. Raises `UserError` or `CorruptInputError`, with file and line,
    for what is no example, and where nothing is left to train or to validate on.
    """
    whole = [example for source in sources for example in _read(kind, source)]
    if validation is not None:
        held_out = list(_read(kind, validation))
        digests = {example.digest for example in held_out}
    else:
        order = sorted({example.digest for example in whole})
        digests = set(order[: max(1, len(order) // HELD_OUT)])
        held_out = [example for example in whole if example.digest in digests]
        held_out.sort(key=lambda example: example.digest)  # its beginning stands for all of it
    train = [example for example in whole if example.digest not in digests]
    if not train:
        raise UserError(
            f"{len(whole)} lines, and none is left to train on beside those held out",
            hint="give more",
        )
    return Examples(train, held_out, _label_names(train, held_out))


def _label_names(train: Sequence[Example], held_out: Sequence[Example]) -> tuple[str, ...]:
    """Return the names in a fixed order; one that is never trained on is an error."""
    seen = Counter(name for example in train for name in example.labels)
    for example in held_out:
        for name in example.labels:
            if name not in seen:
                raise UserError(
                    f"{example.place}: no example to train on has the label {name!r}",
                    hint="give more of it, or --val",
                )
    if seen and not 2 <= len(seen) <= MAX_LABELS:
        raise UserError(
            f"{len(seen)} different labels ({', '.join(sorted(seen)[:3])}): 2 to {MAX_LABELS:,} "
            "can be learned"
        )
    whole = all(name.lstrip("-").isdigit() for name in seen)
    return tuple(sorted(seen, key=(lambda name: (int(name), name)) if whole else None))


def _read(kind: type[Labelled], source: str) -> Iterator[Example]:
    """Yield the examples of a file."""
    empty = True
    try:
        with open(source, "rb") as file:
            for place, record in read_json_lines(file, source, kind.fields):
                yield replace(kind.parse(record), place=place)
                empty = False
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}", hint="check the name") from None
    except UserError as wrong:
        raise CorruptInputError(f"{place}: {wrong}; a line is {kind.fields}") from None
    if empty:
        raise UserError(f"{source} has no lines", hint=f"give .jsonl, each line {kind.fields}")
