"""Labelled examples as a task: lines of .jsonl in, a head on a GPT's body out.

A line of .jsonl (`parse`) becomes an example; an example (`encode`) becomes rows of ids with their
answer; rows (`collate`) become a batch of the head's `losses`. Each kind of
example is a class in a file of its own.
"""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import (
    Arrays,
    Basis,
    Data,
    Objective,
    Pair,
    Sources,
    body_of,
    describe_tokens,
    on_device,
)
from tiedgpt.train.storage import RunDirectory
from tiedgpt.train.tune_options import AnyOptions
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
class LabelScore:
    """How good a head is on examples that it was not trained on."""

    nats: float
    """The mean loss."""
    share: float
    """Of what was asked, how much was answered rightly."""


@dataclass(frozen=True, kw_only=True)
class LabelData(Data):
    """Labelled examples as rows."""

    validation: list[tuple[Example, Row]]


@dataclass(eq=False)
class Labelled(Objective):
    """Train a head, and the body under it, on examples of one kind."""

    tokenizer: Tokenizer
    labels: tuple[str, ...] = ()
    fields: ClassVar[str]
    """What a line looks like, for messages."""
    head_class: ClassVar[type[Head]]
    """What is put on the body."""
    pipeline: ClassVar[str]
    """What the Hugging Face hub calls it."""
    use: ClassVar[str]
    """How the trained `head` is asked, in Python."""
    measure: ClassVar[str] = "accuracy"
    """What the share of right answers is called."""
    keeps_head: ClassVar[bool] = False
    """Whether the head over the vocabulary of a model that is begun with is needed."""

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each label."""
        return {name: number for number, name in enumerate(self.labels)}

    @staticmethod
    @abstractmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the example that a line holds; `UserError` says what is wrong, not where."""

    @abstractmethod
    def encode(self, example: Example, context: int) -> Row | None:
        """Return its ids and its answer; None where the answer does not fit the context."""

    @abstractmethod
    def answer(self, head: Any, example: Example, batch: Sequence[Tensor]) -> str:
        """Return what the head says of an example, which is all of a batch, beside the example."""

    def is_right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return which answers of a batch the head gives rightly, (n,)."""
        ids, lengths, *_, answers = batch
        return head(ids, lengths).argmax(-1) == answers

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return a batch for the head's `losses`: ids (B, T), lengths (B,), answers (B, ...)."""
        ids, lengths = pad([row.rows[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.int64)

    def build(self) -> Head:
        """Return a fresh head on a fresh body."""
        make: Callable[..., Head] = self.head_class
        head = make(GPT(self.config), **({"labels": list(self.labels)} if self.labels else {}))
        freeze(head, self.frozen)
        return head

    def score(
        self, model: Head, batches: Iterable[Arrays], autocast: torch.dtype | None
    ) -> LabelScore:
        """Score examples, by loss and by how many are right."""

        def measure(batch: tuple[Tensor, ...]) -> list[float]:
            terms, right = model.losses(*batch), self.is_right(model, batch)
            sums = [float(right.sum()), float(len(right))]
            counts = self.n_targets(tuple(tensor.cpu().numpy() for tensor in batch))
            for mean, n in zip(terms, counts, strict=True):
                sums += [float(mean) * n, float(n)]
            return sums

        right, asked, *sums = totals(model, batches, measure, autocast=autocast)
        nats = sum(loss / n for loss, n in zip(sums[::2], sums[1::2], strict=True))
        return LabelScore(nats, right / asked)

    def metrics(self, score: LabelScore) -> dict[str, float]:
        """Return the loss and the share of right answers."""
        return {"val_loss": score.nats, f"val_{self.measure.replace(' ', '_')}": score.share}

    @torch.no_grad()
    def sample(self, model: Head, data: Any, step: int, seed: int) -> str:
        """Return what the head says of an example held out, of another one at each step."""
        example, row = data.validation[step % len(data.validation)]
        batch = on_device(self.collate([row]), body_of(model).wte.weight.device)
        with eval_mode(model):
            verdict = "rightly" if self.is_right(model, batch).all() else "wrongly"
            return f"{verdict} {self.answer(model, example, batch)}"

    def describe(self, config: GPTConfig) -> str:
        """Return in words what scores the examples."""
        return f"a {self.head_class.__name__} on the states of the body"


class LabelSources(Sources):
    """Lines of .jsonl of one kind; without --val a tenth of them is held out, by what they say.

    Equal lines are on the same side. Raises `UserError` or `CorruptInputError`, with file and line,
    for what is no example, and where nothing is left to train or to validate on.
    """

    def __init__(
        self, kind: type[Labelled], sources: Sequence[str], validation: str | None = None
    ) -> None:
        self.kind, self.keeps_head = kind, kind.keeps_head
        whole = [example for source in sources for example in _read(kind, source)]
        if validation is not None:
            self.held_out = list(_read(kind, validation))
            digests = {example.digest for example in self.held_out}
        else:
            order = sorted({example.digest for example in whole})
            digests = set(order[: max(1, len(order) // HELD_OUT)])
            self.held_out = [example for example in whole if example.digest in digests]
            self.held_out.sort(key=lambda each: each.digest)  # its beginning stands for all of it
        self.train = [example for example in whole if example.digest not in digests]
        if not self.train:
            raise UserError(
                f"{len(whole)} lines, and none is left to train on beside those held out",
                hint="give more",
            )
        self.labels: tuple[str, ...] = _name_labels(self.train, self.held_out)

    def digest(self) -> str:
        """Return a sha256 of everything, to know changed data by."""
        whole = hashlib.sha256()
        for side in (self.train, self.held_out):
            whole.update(len(side).to_bytes(8, "little") + b"".join(each.digest for each in side))
        return whole.hexdigest()

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the texts of the examples that are trained on, and of all."""
        sides = self.train, self.train + self.held_out
        train, whole = ((text for each in side for text in each.texts) for side in sides)
        return train, whole

    def make(self, run: RunDirectory, options: AnyOptions, basis: Basis) -> Pair:
        """Return the head that learns the answers, and the examples as rows of ids."""
        objective = self.kind(*basis, labels=self.labels)
        context = options.context or basis.config.n_positions
        return objective, encode_examples(objective, self.train, self.held_out, context)


def encode_examples(
    objective: Labelled, train: Sequence[Example], held_out: Sequence[Example], context: int
) -> LabelData:
    """Return examples as rows; an epoch visits every one once, in its own order."""
    notes: list[str] = []
    examples = _encode(objective, "to train on", train, context, notes)
    validation = _encode(objective, "to validate on", held_out, context, notes)
    n = len(examples)

    def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
        order = functools.lru_cache(2)(lambda epoch: permutation(n, seed=seed, epoch=epoch))

        def batch(step: int) -> Arrays:
            first = step * batch_size
            places = (divmod(row, n) for row in range(first, first + batch_size))
            return objective.collate([examples[order(e)[i]][1] for e, i in places])

        return batch

    def read_held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
        rows = [row for _, row in validation]
        rows = rows if n_batches is None else rows[: n_batches * batch_size]
        for at in range(0, len(rows), batch_size):
            yield objective.collate(rows[at : at + batch_size])

    labels = {"labels": list(objective.labels)} if objective.labels else {}
    longest = max(len(ids) for _, row in examples for ids in row.rows)
    more = f"; {len(objective.labels)} labels" if labels else ""
    return LabelData(
        batches=batches,
        held_out=read_held_out,
        row_tokens=max(
            len(row.rows) * max(map(len, row.rows)) for _, row in (*examples, *validation)
        ),
        epoch_rows=n,
        held_out_rows=float(len(validation)),
        n_examples=n,
        n_held_out=len(validation),
        counts={
            "train_examples": {"examples": n, **labels},
            "val_examples": {"examples": len(validation)},
        },
        description={
            "examples": f"{n:,}; {len(validation):,} more to validate on{more}",
            "tokens": f"{describe_tokens(objective.tokenizer)}, the longest row has {longest:,}",
        },
        notes=notes,
        validation=validation,
    )


def _encode(
    objective: Labelled, what: str, examples: Sequence[Example], context: int, notes: list[str]
) -> list[tuple[Example, Row]]:
    """Return the examples with their ids; one that cannot be is left out, and noted."""
    pairs = []
    for example in examples:
        try:
            row = objective.encode(example, context)
        except UserError as error:
            raise UserError(f"{example.place}: {error}") from None
        if row is not None:
            pairs.append((example, row))
    total, left_out = len(examples), len(examples) - len(pairs)
    if not pairs:
        raise UserError(
            f"no example {what} fits a context of {context} tokens", hint="give a longer --context"
        )
    if left_out:
        notes.append(
            f"left out {left_out:,} of {total:,} examples {what}: their answer does not fit "
            f"{context} tokens"
        )
    if cut := sum(row.cut for _, row in pairs):
        notes.append(f"cut {cut:,} of {total:,} examples {what} to {context} tokens")
    return pairs


def _name_labels(train: Sequence[Example], held_out: Sequence[Example]) -> tuple[str, ...]:
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


def read_label(value: Any) -> str:
    """Return a label's name; numbers may be labels, too."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise UserError(f"the label {value!r} is neither a name nor a whole number")
    return str(value)
