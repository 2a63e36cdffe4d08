"""Multiple choice: which continuation of a text is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.core.loss import IGNORED
from tiedgpt.errors import UserError
from tiedgpt.heads import MultipleChoice
from tiedgpt.heads.inputs import choice_texts, read_text, read_texts
from tiedgpt.train.objective import Arrays
from tiedgpt.train.objectives.labelled import Example, Labelled, Row


class Choose(Labelled):
    """{"text": "...", "choices": ["...", ...], "answer": 0}; of a long text the end is taken.

    The language term of the loss counts text with its right continuation: what is wrong is not
    learned as language.
    """

    fields = '{"text": ..., "choices": [...], "answer": 0}'
    head_class = MultipleChoice
    pipeline = "multiple-choice"
    keeps_head = True
    use = 'head(*(x[None] for x in pad([tokenizer.encode(t) for t in ("a b", "a c")]))).argmax()'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the text with each continuation, and the number of the right one."""
        text, choices = read_text(record, "text"), read_texts(record, "choices")
        if len(choices) < 2:
            raise UserError("one choice leaves nothing to choose", hint="give two or more")
        answer = record.get("answer")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise UserError(
                f"the answer {answer!r} is no number of a choice, 0 to {len(choices) - 1}"
            )
        return Example(choice_texts(text, choices), answer)

    def encode(self, example: Example, context: int) -> Row | None:
        """Return a row of ids for each choice, and the number of the right one, ()."""
        rows = [self.tokenizer.encode(text) for text in example.texts]
        cut = max(map(len, rows)) > context
        rows = [row[-context:] for row in rows]
        if len(rows[example.answer]) < 2:  # no token follows another
            return None
        return Row(tuple(rows), np.array(example.answer), cut)

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return ids (B, C, T), lengths (B, C), targets (B, C, T), answers (B,)."""
        n_choices = max(len(row.rows) for row in rows)
        longest = max(len(ids) for row in rows for ids in row.rows)
        ids = np.zeros((len(rows), n_choices, longest), np.int64)
        targets = np.full_like(ids, IGNORED)
        lengths = np.zeros((len(rows), n_choices), np.int64)  # 0: no such choice
        for at, row in enumerate(rows):
            for choice, each in enumerate(row.rows):
                ids[at, choice, : len(each)] = each
                lengths[at, choice] = len(each)
            right = int(row.answer)
            targets[at, right, : len(row.rows[right]) - 1] = row.rows[right][1:]
        return ids, lengths, targets, np.array([row.answer for row in rows], np.int64)

    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return how many tokens and how many choices are asked for."""
        *_, tokens, answers = batch
        return int((tokens != IGNORED).sum()), len(answers)

    def answer(self, head: MultipleChoice, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the choice that scores highest, after the text."""
        return example.texts[int(head(*batch[:2]).argmax())]
