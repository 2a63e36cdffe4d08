"""Labelled examples as a task: lines of .jsonl in, a head on a GPT's body out."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import json_lines, permutation
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads import Head
from tiedgpt.text import Tokenizer
from tiedgpt.train.exercises import Exercise, Malformed, Prepared
from tiedgpt.train.plan import Plan
from tiedgpt.train.pretrained import Pretrained
from tiedgpt.train.task import Arrays, Model, Task, body_of, counts, loss_terms, on_device

HELD_OUT = 10
"""One example in so many is held out."""
MAX_LABELS = 10_000


@dataclass(frozen=True)
class Line:
    """An example and where it stands."""

    place: str
    digest: bytes
    """SHA-256 of what it says."""
    example: Any


@dataclass(frozen=True)
class Examples:
    """What is trained on, what is held out, and the names of all labels."""

    train: list[Line]
    held_out: list[Line]
    labels: tuple[str, ...]

    def digest(self) -> str:
        """Return a sha256 of everything, to know changed data by."""
        whole = hashlib.sha256()
        for side in (self.train, self.held_out):
            whole.update(len(side).to_bytes(8, "little") + b"".join(line.digest for line in side))
        return whole.hexdigest()


@dataclass(frozen=True)
class LabelScore:
    """How good a head is on examples that it was not trained on."""

    nats: float
    """The mean loss."""
    share: float
    """Of what was asked, how much was answered rightly."""
    measure: str
    """What that share is called."""
    examples: int


def read_examples(
    exercise: Exercise, sources: Sequence[str], validation: str | None = None
) -> Examples:
    """Read lines of .jsonl; without `validation` a tenth of them is held out, by what they say.

    Equal lines are on the same side. Raises `UserError` or `CorruptInputError`, with file and line,
    for what is no example, and where nothing is left to train or to validate on.
    """
    lines = [line for source in sources for line in _read(exercise, source)]
    if validation is not None:
        held_out = list(_read(exercise, validation))
        digests = {line.digest for line in held_out}
    else:
        order = sorted({line.digest for line in lines})
        digests = set(order[: max(1, len(order) // HELD_OUT)])
        held_out = [line for line in lines if line.digest in digests]
        held_out.sort(key=lambda line: line.digest)  # so that its beginning stands for all of it
    train = [line for line in lines if line.digest not in digests]
    if not train:
        raise UserError(
            f"{len(lines)} lines, and none is left to train on beside those held out: give more"
        )
    return Examples(train, held_out, _label_names(exercise, train, held_out))


def _label_names(
    exercise: Exercise, train: Sequence[Line], held_out: Sequence[Line]
) -> tuple[str, ...]:
    """Return the names in a fixed order; one that is never trained on is an error."""
    seen = Counter(name for line in train for name in exercise.labels(line.example))
    for line in held_out:
        for name in exercise.labels(line.example):
            if name not in seen:
                raise UserError(
                    f"{line.place}: the label {name!r} is held out and never trained on: give "
                    "more examples of it, or --val"
                )
    if seen and not 2 <= len(seen) <= MAX_LABELS:
        raise UserError(
            f"{len(seen)} different labels ({', '.join(sorted(seen)[:3])}): 2 to {MAX_LABELS:,} "
            "can be learned"
        )
    whole = all(name.lstrip("-").isdigit() for name in seen)
    return tuple(sorted(seen, key=(lambda name: (int(name), name)) if whole else None))


def _read(exercise: Exercise, source: str) -> Iterator[Line]:
    """Yield the examples of a file."""
    empty = True
    try:
        with open(source, "rb") as file:
            for place, record in json_lines(file, source, exercise.fields):
                example = exercise.parse(record)
                yield Line(place, hashlib.sha256(repr(example).encode()).digest(), example)
                empty = False
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}; check the name") from None
    except Malformed as wrong:
        raise CorruptInputError(f"{place}: {wrong}; a line is {exercise.fields}") from None
    if empty:
        raise UserError(f"{source} has no lines: give .jsonl, each line {exercise.fields}")


class Labelled(Task):
    """Train a head, and the body under it; see `task.Task`."""

    unit = "examples"
    row_units = 1

    def __init__(
        self,
        exercise: Exercise,
        examples: Examples,
        config: GPTConfig,
        tokenizer: Tokenizer,
        *,
        context: int | None = None,
        start: Pretrained | None = None,
    ) -> None:
        super().__init__(config, tokenizer, context, start)
        self.exercise = exercise
        self.examples = examples
        self.notes: list[str] = []
        self.train = self._prepare("to train on", examples.train)
        self.held_out = self._prepare("to validate on", examples.held_out)
        self.epoch_rows = len(self.train)
        self.held_out_rows = float(len(self.held_out))
        self.row_tokens = max(
            len(row.rows) * max(map(len, row.rows)) for _, row in (*self.train, *self.held_out)
        )

    def _prepare(self, what: str, lines: Sequence[Line]) -> list[tuple[Any, Prepared]]:
        """Return the examples with their ids; one that cannot be is left out, and noted."""
        numbers = {name: number for number, name in enumerate(self.examples.labels)}
        made = []
        for line in lines:
            try:
                row = self.exercise.prepare(line.example, self.tokenizer, self.context, numbers)
            except (UserError, Malformed) as error:
                raise UserError(f"{line.place}: {error}") from None
            if row is not None:
                made.append((line.example, row))
        left_out, cut = len(lines) - len(made), sum(row.cut for _, row in made)
        if not made:
            raise UserError(
                f"no example {what} fits a context of {self.context} tokens: give a longer "
                "--context"
            )
        if left_out:
            self.notes.append(
                f"left out {left_out:,} of {len(lines):,} examples {what}: their answer does not "
                f"fit {self.context} tokens"
            )
        if cut:
            self.notes.append(
                f"cut {cut:,} of {len(lines):,} examples {what} to {self.context} tokens"
            )
        return made

    def build(self) -> Head:
        """Return a fresh head on a fresh body."""
        return self.exercise.head(GPT(self.config), self.examples.labels)

    def batches(self, plan: Plan) -> Callable[[int], Arrays]:
        """Return the batch of each step; an epoch visits every example once, in its own order."""
        n = len(self.train)
        order = functools.lru_cache(2)(lambda epoch: permutation(n, seed=plan.seed, epoch=epoch))

        def batch(step: int) -> Arrays:
            first = step * plan.batch_size
            places = (divmod(row, n) for row in range(first, first + plan.batch_size))
            return self.exercise.collate([self.train[order(e)[i]][1] for e, i in places])

        return batch

    @torch.no_grad()
    def evaluate(self, model: Model, plan: Plan, n_batches: int | None = None) -> LabelScore:
        """Score the examples held out, by loss and by how many are right."""
        assert isinstance(model, Head)
        device = body_of(model).wte.weight.device
        rows = [row for _, row in self.held_out]
        rows = rows if n_batches is None else rows[: n_batches * plan.micro_batch]
        sums: defaultdict[int, float] = defaultdict(float)
        asked: Counter[int] = Counter()
        right = of = 0
        training = model.training
        model.eval()
        try:
            for first in range(0, len(rows), plan.micro_batch):
                arrays = self.exercise.collate(rows[first : first + plan.micro_batch])
                batch = on_device(arrays, device)
                with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
                    terms = loss_terms(model, batch)
                    judged = self.exercise.judge(model, batch)
                for at, (mean, n) in enumerate(zip(terms, counts(terms, batch), strict=True)):
                    sums[at] += float(mean) * int(n)
                    asked[at] += int(n)
                right, of = right + judged.right, of + judged.asked
        finally:
            model.train(training)
        nats = sum(sums[at] / asked[at] for at in sums)
        return LabelScore(nats, right / of, self.exercise.measure, len(rows))

    def metrics(self, score: LabelScore) -> dict[str, float]:
        """Return the loss and the share of right answers."""
        return {"val_loss": score.nats, f"val_{score.measure.replace(' ', '_')}": score.share}

    @torch.no_grad()
    def sample(self, model: Model, plan: Plan, step: int) -> str:
        """Return an example held out, another at each step, beside what the head says of it."""
        assert isinstance(model, Head)
        training = model.training
        model.eval()
        try:
            return self.exercise.show(
                model, *self.held_out[step % len(self.held_out)], self.tokenizer
            )
        finally:
            model.train(training)
