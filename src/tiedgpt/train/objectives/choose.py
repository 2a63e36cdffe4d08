"""Multiple choice: the right continuation of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.core.loss import IGNORED
from tiedgpt.errors import UserError
from tiedgpt.heads import MultipleChoice
from tiedgpt.heads.inputs import read_choices
from tiedgpt.train.objective import Arrays
from tiedgpt.train.objectives.labelled import Example, Labelled, Row


class Choose(Labelled):
    """{"text": "...", "choices": ["...", ...], "answer": 0}; a long text is cut to its end.

    The language term of the loss counts only the right continuation, so that the model does not
    learn wrong ones as language.
    """

    fields = '{"text": ..., "choices": [...], "answer": 0}'
    head_class = MultipleChoice
    keeps_head = True
    use = 'head(*(x[None] for x in pad([tokenizer.encode(t) for t in ("a b", "a c")]))).argmax()'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the text with each continuation, and the index of the right one."""
        texts, answer = read_choices(record), record.get("answer")
        if len(texts) < 2:
            raise UserError("one choice leaves nothing to choose", hint="give two or more")
        if type(answer) is not int or not 0 <= answer < len(texts):
            raise UserError(
                f"the answer {answer!r} is not the index of a choice, 0 to {len(texts) - 1}"
            )
        return Example(texts, answer)

    def encode(self, example: Example, context: int) -> Row | None:
        """Return the ids of each choice; None if the right one has no token to predict."""
        assert example.answer is not None
        choices = [self.tokenizer.encode(text) for text in example.texts]
        cut = max(map(len, choices)) > context
        choices = [ids[-context:] for ids in choices]
        if len(choices[example.answer]) < 2:
            return None
        return Row(tuple(choices), example.answer, cut)

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
