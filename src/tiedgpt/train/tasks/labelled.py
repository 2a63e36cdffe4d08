"""Labelled examples: records train a head on a GPT's body.

`parse` turns a line into an example, `encode` an example into ids with their answer, and `collate`
several of these into a batch for the head's `losses`. A task of labelled examples is a subclass of
`Labelled`, or of `Answered` if an answer is right or wrong.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, MultipleChoice, SequenceClassifier, pad
from tiedgpt.heads.inputs import read_answer, read_label, read_text
from tiedgpt.runtime import eval_mode
from tiedgpt.train.step.loss import Arrays, body_of, on_device
from tiedgpt.train.tasks.examples import (
    ExampleFormat,
    LabelData,
    LabelledExample,
    LabelledRow,
    LabelSources,
)
from tiedgpt.train.tasks.publisher import Publisher, Showcase
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Score, Task
from tiedgpt.tune import freeze


@dataclass(frozen=True)
class LabelScore(Score):
    """The score of a head on held-out examples."""

    accuracy: float
    """Share of right answers."""


class Labelled(Task, ExampleFormat):
    """Train a head, and the body under it, on labelled examples."""

    use: ClassVar[str]
    """Python code that calls the trained `head`."""
    input_example: ClassVar[str]
    """Arguments of `tiedgpt classify RUN` that show its use."""
    keeps_head: ClassVar[bool] = False

    @abstractmethod
    def answer(self, head: Any, example: LabelledExample, batch: Sequence[Tensor]) -> str:
        """Return the head's answer to an example, with the example, from its batch of one."""

    @override
    def read(self) -> LabelSources:
        return LabelSources(self, self.options.data, self.options.val, **self.options.file_reading)

    def head_options(self, data: LabelData) -> dict[str, Any]:
        """Return the arguments of the head."""
        return {"labels": list(data.labels)} if data.labels else {}

    @override
    def build(self, config: GPTConfig, data: Any) -> Head:
        """Return a fresh head on a fresh body."""
        make: Callable[..., Head] = self.head_class
        head = make(GPT(config), **self.head_options(data))
        if self.options.freeze:
            freeze(head, self.options.freeze)
        return head

    @override
    def measure(self, model: Head, data: Data, batch: tuple[Tensor, ...]) -> list[float]:
        """Return (loss x targets, targets) of each term of the loss."""
        counts = self.n_targets(tuple(tensor.cpu().numpy() for tensor in batch))
        pairs = zip(model.losses(*batch), counts, strict=True)
        return [number for mean, n in pairs for number in (float(mean) * n, float(n))]

    @override
    def score(self, data: Data, sums: Sequence[float]) -> Score:
        return Score(sum(loss / n for loss, n in zip(sums[::2], sums[1::2], strict=True)))

    @override
    @torch.no_grad()
    def sample(self, model: Head, data: Any, step: int, seed: int) -> str:
        """Return the head's answer to a held-out example, a different one at each step."""
        row = data.validation[step % len(data.validation)]
        batch = on_device(self.collate([row]), body_of(model).wte.weight.device)
        with eval_mode(model):
            return self.describe_answer(model, row.example, batch)

    def describe_answer(self, head: Any, example: LabelledExample, batch: Sequence[Tensor]) -> str:
        """Return the head's answer, and how good it is."""
        return self.answer(head, example, batch)

    def baseline(self, data: LabelData) -> str:
        """Return the score of an answer that ignores the text, in words."""
        return ""

    @override
    def publisher(self, config: GPTConfig, data: Any) -> Publisher:
        return HeadPublisher(self, config, data)


class Answered(Labelled):
    """Train a head whose answers are right or wrong."""

    def is_right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return whether the head answers rightly, for each example of a batch (B,)."""
        ids, lengths, *_, answers = batch
        return head(ids, lengths).argmax(-1) == answers

    @override
    def measure(self, model: Head, data: Data, batch: tuple[Tensor, ...]) -> list[float]:
        right = self.is_right(model, batch)
        return [float(right.sum()), float(len(right)), *super().measure(model, data, batch)]

    @override
    def score(self, data: Data, sums: Sequence[float]) -> LabelScore:
        """Return the loss and the accuracy."""
        n_right, n_examples, *losses = sums
        return LabelScore(super().score(data, losses).nats, n_right / n_examples)

    @override
    def describe_answer(self, head: Any, example: LabelledExample, batch: Sequence[Tensor]) -> str:
        verdict = "rightly" if self.is_right(head, batch).all() else "wrongly"
        return f"{verdict} {self.answer(head, example, batch)}"

    @override
    def baseline(self, data: LabelData) -> str:
        """Return the accuracy of the commonest answer."""
        ((answer, count),) = Counter(row.answer for row in data.validation).most_common(1)
        name = data.labels[int(answer)] if data.labels else f"choice {answer}"
        return f"always {name} has an accuracy of {count / len(data.validation):.4f}"


class HeadPublisher(Publisher):
    """A head on a body."""

    data: LabelData

    def __init__(self, task: Labelled, config: GPTConfig, data: LabelData) -> None:
        super().__init__(config, data.tokenizer, type(task).__name__)
        self.labelled, self.data = task, data

    @override
    def describe(self) -> str:
        return f"a {self.labelled.head_class.__name__} on the states of the body"

    @property
    @override
    def transformers_class(self) -> str | None:
        return self.labelled.head_class.class_in_transformers(self.config)

    @override
    def show(self, run: Path, model: Path) -> Showcase:
        """Return the task's baseline, and commands and code that use the head."""
        task = self.labelled
        head, labelled = task.head_class, task.options.val or "LABELLED.jsonl"
        return Showcase(
            accuracy=task.baseline(self.data),
            commands=[
                f"classify {shlex.quote(str(run))} {task.input_example}",
                f"eval {shlex.quote(str(run))} {shlex.quote(labelled)}",
            ],
            python="from tiedgpt import Tokenizer\n"
            "from tiedgpt.heads import pad\n"
            f"from {head.home()} import {head.__name__}\n"
            f"head = {head.__name__}.from_pretrained({str(model)!r})\n"
            f"tokenizer = Tokenizer.from_pretrained({str(model)!r})\n"
            f"{task.use}",
        )


class Classify(Answered):
    """{"text": "...", "label": "name or number"}; a long text is cut to its beginning."""

    fields = '{"text": ..., "label": ...}'
    read_fields = ("text", "label")
    head_class = SequenceClassifier
    input_example = '"a text"'
    use = 'head.labels[head(*pad([tokenizer.encode_document("a text")])).argmax()]'

    @staticmethod
    @override
    def parse(record: Mapping[str, Any]) -> LabelledExample:
        """Return the example with its text and label; a label may be a number."""
        return LabelledExample((read_text(record, "text"),), labels=(read_label(record),))

    @override
    def collate(self, rows: Sequence[LabelledRow]) -> Arrays:
        """Return ids (B, T), lengths (B,), labels (B,)."""
        ids, lengths = pad([row.ids[0] for row in rows])
        return ids.numpy(), lengths.numpy(), np.array([row.answer for row in rows], np.int64)

    @override
    def answer(
        self, head: SequenceClassifier, example: LabelledExample, batch: Sequence[Tensor]
    ) -> str:
        """Return the most likely label, and the text."""
        return f"{head.labels[int(head(*batch[:2]).argmax())]}: {example.texts[0]}"


class Choose(Answered):
    """{"text": "...", "choices": ["...", ...], "answer": 0}; a long text is cut to its end.

    The language term of the loss counts only the right continuation, so that the model does not
    learn wrong ones as language.
    """

    fields = '{"text": ..., "choices": [...], "answer": 0}'
    read_fields = ("text", "choices", "answer")
    head_class = MultipleChoice
    keeps_head = True
    input_example = '"a text" --choices "one end" "another end"'
    use = (
        'rows = [tokenizer.encode_document(text) for text in ("a b", "a c")]\n'
        "head(*(x[None] for x in pad(rows))).argmax()"
    )

    @staticmethod
    @override
    def parse(record: Mapping[str, Any]) -> LabelledExample:
        """Return the text with each continuation, and the index of the right one."""
        return LabelledExample(*read_answer(record))

    @override
    def collate(self, rows: Sequence[LabelledRow]) -> Arrays:
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
            right = row.ids[int(row.answer)]
            targets[at, int(row.answer), : len(right) - 1] = right[1:]
        return ids, lengths, targets, np.array([row.answer for row in rows], np.int64)

    @override
    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return the number of predicted tokens and of choices."""
        *_, tokens, answers = batch
        return int((tokens != IGNORED).sum()), len(answers)

    @override
    def answer(
        self, head: MultipleChoice, example: LabelledExample, batch: Sequence[Tensor]
    ) -> str:
        """Return the most likely choice, after the text."""
        return example.texts[int(head(*batch[:2]).argmax())]
