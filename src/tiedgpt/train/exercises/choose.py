"""Which of several continuations of a text is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, MultipleChoice
from tiedgpt.text import Tokenizer
from tiedgpt.train.exercises.exercise import (
    UNANSWERED,
    Exercise,
    Malformed,
    Prepared,
    Right,
    list_in,
    text_in,
)
from tiedgpt.train.task import Arrays


@dataclass(frozen=True)
class Question:
    """A text, its continuations, and which is right."""

    text: str
    choices: tuple[str, ...]
    answer: int

    def whole(self, choice: str) -> str:
        """Return the text with a continuation after it."""
        joined = self.text[-1:].isspace() or choice[:1].isspace()
        return self.text + ("" if joined else " ") + choice


class Choose(Exercise):
    """{"text": "...", "choices": ["...", ...], "answer": 0}; of a long text the end is taken.

    The language term of the loss counts text with its right continuation: what is wrong is not
    learned as language.
    """

    fields = '{"text": ..., "choices": [...], "answer": 0}'
    head_class = MultipleChoice
    use = 'head(*(x[None] for x in pad([tokenizer.encode(t) for t in ("a b", "a c")]))).argmax()'
    measure = "accuracy"

    def parse(self, record: Mapping[str, Any]) -> Question:
        """Return text, choices and answer."""
        text, choices = text_in(record, "text"), list_in(record, "choices")
        for choice in choices:
            if not isinstance(choice, str) or not choice.strip():
                raise Malformed(f"{choice!r} in 'choices' is no text")
        if len(choices) < 2:
            raise Malformed("one choice leaves nothing to choose: give two or more")
        answer = record.get("answer")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise Malformed(
                f"the answer {answer!r} is no number of a choice, 0 to {len(choices) - 1}"
            )
        return Question(text, tuple(choices), answer)

    def texts(self, example: Question) -> Iterable[str]:
        """Return the text with each continuation."""
        return map(example.whole, example.choices)

    def prepare(
        self, example: Question, tokenizer: Tokenizer, context: int, numbers: Mapping[str, int]
    ) -> Prepared | None:
        """Return a row of ids for each choice, and the number of the right one, ()."""
        rows = [tokenizer.encode(example.whole(choice)) for choice in example.choices]
        cut = max(map(len, rows)) > context
        rows = [row[-context:] for row in rows]
        if len(rows[example.answer]) < 2:  # no token follows another
            return None
        return Prepared(tuple(rows), np.array(example.answer), cut)

    def head(self, gpt: GPT, labels: Sequence[str]) -> Head:
        """Return the double heads."""
        return MultipleChoice(gpt)

    def collate(self, rows: Sequence[Prepared]) -> Arrays:
        """Return ids (B, C, T), lengths (B, C), targets (B, C, T), answers (B,)."""
        n_choices = max(len(row.rows) for row in rows)
        longest = max(len(ids) for row in rows for ids in row.rows)
        ids = np.zeros((len(rows), n_choices, longest), np.int64)
        targets = np.full_like(ids, UNANSWERED)
        lengths = np.zeros((len(rows), n_choices), np.int64)  # 0: no such choice
        for at, row in enumerate(rows):
            for choice, each in enumerate(row.rows):
                ids[at, choice, : len(each)] = each
                lengths[at, choice] = len(each)
            right = int(row.answer)
            targets[at, right, : len(row.rows[right]) - 1] = row.rows[right][1:]
        return ids, lengths, targets, np.array([row.answer for row in rows], np.int64)

    def judge(self, head: Head, batch: Sequence[Tensor]) -> Right:
        """Count questions whose right choice scores highest."""
        ids, lengths, _, answers = batch
        right = head(ids, lengths).argmax(-1) == answers
        return Right(int(right.sum()), len(answers))

    def show(self, head: Head, example: Question, prepared: Prepared, tokenizer: Tokenizer) -> str:
        """Return the choice that scores highest, after the text."""
        batch = self.collate([prepared])
        device = head.gpt.wte.weight.device
        ids, lengths = (torch.from_numpy(array).to(device) for array in batch[:2])
        said = int(head(ids, lengths).argmax())
        verdict = "rightly" if said == example.answer else "wrongly"
        return f"{verdict}: {example.text} -> {example.choices[said]}"
