"""Question answering: where in a text the answer stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.errors import UserError
from tiedgpt.heads import Head, SpanFinder, best_spans
from tiedgpt.heads.inputs import find_token_spans, question_text, read_text
from tiedgpt.train.objectives.labelled import Example, Labelled, Row


class Answer(Labelled):
    """Where in a text the answer to a question stands; of a long text the beginning is taken.

    {"question": "...", "context": "...", "answer": "..."}              where it first stands
    {"question": "...", "context": "...", "start": 12, "end": 20}       from, to: characters

    The question comes first, then a line break, then the context: what is read later has seen it.
    """

    fields = '{"question": ..., "context": ..., "answer": ...} or with "start" and "end"'
    head_class = SpanFinder
    pipeline = "question-answering"
    use = 'best_spans(head(*pad([tokenizer.encode("question\\ncontext")])))  # tokens: first, last'
    measure = "exact match"

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return question and context as one text, and the answer's characters in it."""
        question, context = read_text(record, "question"), read_text(record, "context")
        start, end, answer = (record.get(key) for key in ("start", "end", "answer"))
        if answer is not None:
            if not isinstance(answer, str) or not answer.strip():
                raise UserError(f"the answer {answer!r} is no text")
            start = context.find(answer) if start is None else start
            end = start + len(answer) if type(start) is int and end is None else end
        if type(start) is not int or type(end) is not int:
            raise UserError("neither an 'answer' nor 'start' and 'end' say where the answer is")
        if start < 0:
            raise UserError(f"the answer {answer!r} is not in the context")
        if not start < end <= len(context):
            raise UserError(
                f"from {start} to {end} is no part of a context of {len(context)} characters"
            )
        if answer is not None and context[start:end] != answer:
            raise UserError(f"from {start} to {end} the context says {context[start:end][:40]!r}")
        text, offset = question_text(question, context)
        return Example((text,), (offset + start, offset + end))

    def encode(self, example: Example, context: int) -> Row | None:
        """Return ids, and the answer's first and last token, (2,); None if it is cut off."""
        (text,) = example.texts
        ids = self.tokenizer.encode(text)
        (span,) = find_token_spans(ids, self.tokenizer, text, [example.answer])
        if span[1] >= context:
            return None
        return Row((ids[:context],), np.array(span), cut=len(ids) > context)

    def is_right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return which spans are found exactly, token for token."""
        ids, lengths, spans = batch
        return (best_spans(head(ids, lengths)) == spans).all(-1)

    def answer(self, head: SpanFinder, example: Example, batch: Sequence[Tensor]) -> str:
        """Return what was found, and the text."""
        first, last = best_spans(head(*batch[:2]))[0].tolist()
        found = self.tokenizer.decode(batch[0][0, first : last + 1].tolist())
        return f"{found}: {example.texts[0]}"
