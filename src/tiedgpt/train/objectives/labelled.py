"""Labelled examples: records train a head on a GPT's body, one label or choice for each.

`parse` turns a line into an example, `encode` an example into ids with their answer, and `collate`
several of these into a batch for the head's `losses`.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.data import documents, permutation
from tiedgpt.data.records import UnreadFields
from tiedgpt.data.remarks import note_special_tokens, special_token_finder
from tiedgpt.errors import UserError
from tiedgpt.evaluate.perplexity import totals
from tiedgpt.files import format_count, parse_records
from tiedgpt.heads import Head, MultipleChoice, SequenceClassifier, pad
from tiedgpt.heads.inputs import read_answer, read_label, read_text
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.train.dataset import Data, Sources
from tiedgpt.train.objective import Arrays, ModelSetup, Objective, Showcase, body_of, on_device
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.storage import RunDirectory
from tiedgpt.tune import freeze

EXAMPLES_PER_HELD_OUT = 10
"""One example in this many is held out."""
MAX_LABELS = 10_000


@dataclass(frozen=True)
class Example:
    """One line of .jsonl."""

    texts: tuple[str, ...]
    """The text, or one for each choice."""
    answer: int | None = None
    """Index of the right choice."""
    labels: tuple[str, ...] = ()
    """The label of a text."""
    place: str = field(default="", repr=False)
    """File and line."""

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of texts, answer and labels."""
        return hashlib.sha256(repr(self).encode()).digest()


@dataclass(frozen=True)
class Row:
    """An example as ids."""

    example: Example
    ids: tuple[list[int], ...]
    """The ids of the text, or of each choice."""
    answer: int
    """Index of the label, or of the right choice."""
    cut: bool
    """Whether text was left out because it is longer than the context."""


@dataclass(frozen=True)
class LabelScore:
    """The score of a head on held-out examples."""

    nats: float
    """Mean loss."""
    accuracy: float
    """Share of right answers."""


@dataclass(frozen=True, kw_only=True)
class LabelData(Data):
    """Labelled examples as ids."""

    validation: list[Row]


@dataclass(eq=False)
class Labelled(Objective):
    """Train a head, and the body under it, on labelled examples."""

    tokenizer: Tokenizer
    labels: tuple[str, ...] = ()
    fields: ClassVar[str]
    """The fields of a line, for messages."""
    read_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that `parse` reads, if others are to be counted in a note."""
    head_class: ClassVar[type[Head]]
    """The head on the body."""
    use: ClassVar[str]
    """Python code that calls the trained `head`."""
    input_example: ClassVar[str]
    """Arguments of `tiedgpt classify RUN` that show its use."""
    keeps_end: ClassVar[bool] = False
    """Whether a long text is cut to its end, and not to its beginning."""
    keeps_head: ClassVar[bool] = False

    @classmethod
    def open(cls, options: TrainOptions) -> LabelSources:
        """Open the labelled examples of the options."""
        return LabelSources(cls, options.data, options.val, **options.file_reading)

    @classmethod
    def make(
        cls, sources: Any, run: RunDirectory, options: TrainOptions, setup: ModelSetup
    ) -> tuple[Self, Data]:
        """Return the objective, and the examples as ids."""
        objective = cls(*setup, labels=sources.labels)
        context = options.context or setup.config.n_positions
        data = objective.encode_examples(sources.train, sources.held_out, context)
        return objective, replace(data, notes=[*sources.notes, *data.notes])

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Index of each label."""
        return {name: number for number, name in enumerate(self.labels)}

    @staticmethod
    @abstractmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the example on a line; raise `UserError`, without the line, if it is wrong."""

    def encode(self, example: Example, context: int) -> Row | None:
        """Return an example's ids and answer; None if a choice has no token to predict."""
        window = slice(-context, None) if self.keeps_end else slice(context)
        texts = [self.tokenizer.encode_document(text) for text in example.texts]
        ids = tuple(text[window] for text in texts)
        answer = example.answer
        if answer is None:
            answer = self.numbers[example.labels[0]]
        elif len(ids[answer]) < 2:
            return None
        return Row(example, ids, answer, cut=max(map(len, texts)) > context)

    @abstractmethod
    def answer(self, head: Any, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the head's answer to an example, with the example, from its batch of one."""

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return a batch for the head's `losses`: ids, lengths, ..., answers (B,)."""

    def encode_examples(
        self, train: Sequence[Example], held_out: Sequence[Example], context: int
    ) -> LabelData:
        """Return examples as ids; each epoch visits every example once, in a new order."""
        rows, notes = self._encode_all("to train on", train, context)
        validation, more_notes = self._encode_all("to validate on", held_out, context)
        n, find_special_tokens = len(rows), special_token_finder(self.tokenizer)
        texts = (text for example in (*train, *held_out) for text in example.texts)
        spelled = Counter(chain.from_iterable(map(find_special_tokens, texts)))

        def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
            order = functools.lru_cache(2)(lambda epoch: permutation(n, seed=seed, epoch=epoch))

            def batch(step: int) -> Arrays:
                first = step * batch_size
                places = (divmod(row, n) for row in range(first, first + batch_size))
                return self.collate([rows[order(epoch)[i]] for epoch, i in places])

            return batch

        def read_held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
            n_rows = len(validation) if n_batches is None else n_batches * batch_size
            chosen = validation[:n_rows]
            for at in range(0, len(chosen), batch_size):
                yield self.collate(chosen[at : at + batch_size])

        longest = max(len(ids) for row in rows for ids in row.ids)
        n_labels = f"; {format_count(len(self.labels), 'label')}" if self.labels else ""
        return LabelData(
            batches=batches,
            held_out=read_held_out,
            row_tokens=max(len(r.ids) * max(map(len, r.ids)) for r in (*rows, *validation)),
            epoch_rows=n,
            held_out_rows=float(len(validation)),
            n_examples=n,
            n_held_out=len(validation),
            predicts_tokens=self.head_class.predicts_tokens,
            counts={
                "train_examples": {
                    "examples": n,
                    **({"labels": list(self.labels)} if self.labels else {}),
                },
                "val_examples": {"examples": len(validation)},
            },
            description={
                "examples": f"{n:,}; {len(validation):,} more to validate on{n_labels}",
                "tokens": f"{self.tokenizer.kind} vocabulary of {len(self.tokenizer):,}, the "
                f"longest row has {longest:,}",
            },
            notes=[*notes, *more_notes, *note_special_tokens(spelled)],
            validation=validation,
        )

    def _encode_all(
        self, what: str, examples: Sequence[Example], context: int
    ) -> tuple[list[Row], list[str]]:
        """Return the examples as ids, and notes about those left out or cut."""
        rows, notes = [], []
        for example in examples:
            try:
                row = self.encode(example, context)
            except UserError as error:
                raise UserError(f"{example.place}: {error}") from None
            if row is not None:
                rows.append(row)
        total, left_out = len(examples), len(examples) - len(rows)
        if not rows:
            raise UserError(
                f"no example {what} fits a context of {format_count(context, 'token')}",
                hint="give a longer --context",
            )
        if left_out:
            notes.append(
                f"left out {left_out:,} of {total:,} examples {what}: their answer does not fit "
                f"{context} tokens"
            )
        if cut := sum(row.cut for row in rows):
            notes.append(f"cut {cut:,} of {total:,} examples {what} to {context} tokens")
        return rows, notes

    def is_right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return whether the head answers rightly, for each example of a batch (B,)."""
        ids, lengths, *_, answers = batch
        return head(ids, lengths).argmax(-1) == answers

    def build(self) -> Head:
        """Return a fresh head on a fresh body."""
        make: Callable[..., Head] = self.head_class
        head = make(GPT(self.config), **({"labels": list(self.labels)} if self.labels else {}))
        if self.frozen:
            freeze(head, self.frozen)
        return head

    def score(
        self, model: Head, batches: Iterable[Arrays], autocast: torch.dtype | None
    ) -> LabelScore:
        """Score examples by loss and accuracy."""

        def measure(batch: tuple[Tensor, ...]) -> list[float]:
            terms, right = model.losses(*batch), self.is_right(model, batch)
            sums = [float(right.sum()), float(len(right))]
            counts = self.n_targets(tuple(tensor.cpu().numpy() for tensor in batch))
            for mean, n in zip(terms, counts, strict=True):
                sums += [float(mean) * n, float(n)]
            return sums

        n_right, n_examples, *sums = totals(model, batches, measure, autocast=autocast)
        nats = sum(loss / n for loss, n in zip(sums[::2], sums[1::2], strict=True))
        return LabelScore(nats, n_right / n_examples)

    def metrics(self, score: LabelScore) -> dict[str, float]:
        """Return the loss and the accuracy."""
        return {"val_loss": score.nats, "val_accuracy": score.accuracy}

    @torch.no_grad()
    def sample(self, model: Head, data: Any, step: int, seed: int) -> str:
        """Return the head's answer to a held-out example, a different one at each step."""
        row = data.validation[step % len(data.validation)]
        batch = on_device(self.collate([row]), body_of(model).wte.weight.device)
        with eval_mode(model):
            verdict = "rightly" if self.is_right(model, batch).all() else "wrongly"
            return f"{verdict} {self.answer(model, row.example, batch)}"

    def describe(self, config: GPTConfig) -> str:
        """Return a description of the head."""
        return f"a {self.head_class.__name__} on the states of the body"

    @property
    def transformers_class(self) -> str | None:
        """The class of transformers that loads the published head, or None."""
        return self.head_class.class_in_transformers(self.config)

    def show(self, directory: RunDirectory, data: Any, options: TrainOptions) -> Showcase:
        """Return the accuracy of the commonest answer, and commands and code that use the head."""
        head, path = self.head_class.__name__, str(directory.model)
        here, labelled = shlex.quote(str(directory.path)), options.val or "LABELLED.jsonl"
        ((answer, count),) = Counter(row.answer for row in data.validation).most_common(1)
        name = self.labels[answer] if self.labels else f"choice {answer}"
        return Showcase(
            accuracy=f"always {name} has an accuracy of {count / len(data.validation):.4f}",
            commands=[
                f"classify {here} {self.input_example}",
                f"eval {here} {shlex.quote(labelled)}",
            ],
            python="from tiedgpt import Tokenizer\n"
            f"from tiedgpt.heads import {head}, pad\n"
            f"head = {head}.from_pretrained({path!r})\n"
            f"tokenizer = Tokenizer.from_pretrained({path!r})\n"
            f"{self.use}",
        )


class LabelSources(Sources):
    """Records for one objective; without `validation`, a tenth of them is held out.

    `sources`, `validation` and the options of `reading` are those of `tiedgpt.data.documents`.

    The split follows the content, so equal lines are on the same side. Raises `UserError` or
    `CorruptInputError`, with file and line, for a wrong line, and `UserError` if no example is left
    to train on.
    """

    def __init__(
        self,
        kind: type[Labelled],
        sources: Sequence[str],
        validation: str | None = None,
        **reading: Any,
    ) -> None:
        examples, self.notes = _read(kind, sources, reading)
        if validation is not None:
            self.held_out, notes = _read(kind, [validation], reading)
            self.notes += [f"--val: {note}" for note in notes]
            digests = {example.digest for example in self.held_out}
        else:
            order = sorted({example.digest for example in examples})
            digests = set(order[: max(1, len(order) // EXAMPLES_PER_HELD_OUT)])
            self.held_out = [example for example in examples if example.digest in digests]
            self.held_out.sort(key=lambda example: example.digest)  # any prefix is a random sample
        self.train = [example for example in examples if example.digest not in digests]
        if not self.train:
            raise UserError(
                f"{len(examples)} lines: after holding some out, none is left to train on",
                hint="give more",
            )
        self.labels: tuple[str, ...] = _name_labels(self.train, self.held_out)

    def digest(self) -> str:
        """Return a sha256 of all examples, which detects changed data."""
        total = hashlib.sha256()
        for side in (self.train, self.held_out):
            total.update(len(side).to_bytes(8, "little") + b"".join(e.digest for e in side))
        return total.hexdigest()

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the texts of the training examples, and of all examples."""
        sides = self.train, self.train + self.held_out
        train, everything = ((text for e in side for text in e.texts) for side in sides)
        return train, everything


def _name_labels(train: Sequence[Example], held_out: Sequence[Example]) -> tuple[str, ...]:
    """Return the labels, sorted; a held-out label without training examples is an error."""
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
    numeric = all(name.lstrip("-").isdigit() for name in seen)
    return tuple(sorted(seen, key=(lambda name: (int(name), name)) if numeric else None))


def _read(
    kind: type[Labelled], sources: Sequence[str], reading: Mapping[str, Any]
) -> tuple[list[Example], list[str]]:
    """Return the examples of files, and notes about the files."""
    corpus, unread = documents(sources, **reading, only_records=True), UnreadFields()

    def parse(record: dict[str, Any], place: str) -> Example:
        example = replace(kind.parse(record), place=place)
        if kind.read_fields:
            unread.count(record, kind.read_fields)
        return example

    examples = [*parse_records(corpus.records(kind.fields), kind.fields, parse)]
    if not examples:
        names = ", ".join(sources)
        raise UserError(f"{names} has no lines", hint=f"give .jsonl, each line {kind.fields}")
    return examples, [*corpus.remarks.notes(), *unread.notes()]


class Classify(Labelled):
    """{"text": "...", "label": "name or number"}; a long text is cut to its beginning."""

    fields = '{"text": ..., "label": ...}'
    read_fields = ("text", "label")
    head_class = SequenceClassifier
    input_example = '"a text"'
    use = 'head.labels[head(*pad([tokenizer.encode_document("a text")])).argmax()]'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the example with its text and label; a label may be a number."""
        return Example((read_text(record, "text"),), labels=(read_label(record),))

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return ids (B, T), lengths (B,), labels (B,)."""
        ids, lengths = pad([row.ids[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.int64)

    def answer(self, head: SequenceClassifier, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the most likely label, and the text."""
        return f"{head.labels[int(head(*batch[:2]).argmax())]}: {example.texts[0]}"


class Choose(Labelled):
    """{"text": "...", "choices": ["...", ...], "answer": 0}; a long text is cut to its end.

    The language term of the loss counts only the right continuation, so that the model does not
    learn wrong ones as language.
    """

    fields = '{"text": ..., "choices": [...], "answer": 0}'
    read_fields = ("text", "choices", "answer")
    head_class = MultipleChoice
    keeps_end = keeps_head = True
    input_example = '"a text" --choices "one end" "another end"'
    use = (
        'rows = [tokenizer.encode_document(text) for text in ("a b", "a c")]\n'
        "head(*(x[None] for x in pad(rows))).argmax()"
    )

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the text with each continuation, and the index of the right one."""
        return Example(*read_answer(record))

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return ids (B, C, T), lengths (B, C), targets (B, C, T), answers (B,)."""
        n_choices = max(len(row.ids) for row in rows)
        longest = max(len(ids) for row in rows for ids in row.ids)
        ids = np.zeros((len(rows), n_choices, longest), np.int64)
        targets = np.full_like(ids, IGNORED)
        lengths = np.zeros((len(rows), n_choices), np.int64)  # 0: an absent choice
        for at, row in enumerate(rows):
            for number, choice in enumerate(row.ids):
                ids[at, number, : len(choice)] = choice
                lengths[at, number] = len(choice)
            right = row.ids[row.answer]
            targets[at, row.answer, : len(right) - 1] = right[1:]
        return ids, lengths, targets, np.array([row.answer for row in rows], np.int64)

    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return the number of predicted tokens and of choices."""
        *_, tokens, answers = batch
        return int((tokens != IGNORED).sum()), len(answers)

    def answer(self, head: MultipleChoice, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the most likely choice, after the text."""
        return example.texts[int(head(*batch[:2]).argmax())]
