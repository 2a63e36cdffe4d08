"""Where in a text the answer to a question stands.

    {"question": "...", "context": "...", "answer": "..."}                where it first stands
    {"question": "...", "context": "...", "start": 12, "end": 20}         from, to: characters

The question comes first, then a line break, then the context: what is read later has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, SpanFinder, best_spans
from tiedgpt.text import Tokenizer
from tiedgpt.train.exercises.exercise import (
    Exercise,
    Malformed,
    Places,
    Prepared,
    Right,
    text_in,
)


@dataclass(frozen=True)
class Question:
    """A question, a text, and where in the text the answer stands (characters from, to)."""

    question: str
    context: str
    start: int
    end: int

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"{self.question}\n{self.context}"


class Answer(Exercise):
    """An answer's first and last token; of a long text the beginning is taken."""

    fields = '{"question": ..., "context": ..., "answer": ...} or with "start" and "end"'
    head_class = SpanFinder
    use = 'best_spans(head(*pad([tokenizer.encode("question\\ncontext")])))  # tokens: first, last'
    measure = "exact match"

    def parse(self, record: Mapping[str, Any]) -> Question:
        """Return question, context and the answer's place."""
        question, context = text_in(record, "question"), text_in(record, "context")
        start, end, answer = (record.get(key) for key in ("start", "end", "answer"))
        if answer is not None:
            if not isinstance(answer, str) or not answer.strip():
                raise Malformed(f"the answer {answer!r} is no text")
            start = context.find(answer) if start is None else start
            end = start + len(answer) if type(start) is int and end is None else end
        if type(start) is not int or type(end) is not int:
            raise Malformed("neither an 'answer' nor 'start' and 'end' say where the answer is")
        if start < 0 or not start < end <= len(context):
            raise Malformed(
                f"the answer {answer!r} is not in the context"
                if start < 0
                else f"from {start} to {end} is no part of a context of {len(context)} characters"
            )
        if answer is not None and context[start:end] != answer:
            raise Malformed(f"from {start} to {end} the context says {context[start:end][:40]!r}")
        return Question(question, context, start, end)

    def texts(self, example: Question) -> Iterable[str]:
        """Return question and context as they are read."""
        return (example.text,)

    def prepare(
        self, example: Question, tokenizer: Tokenizer, context: int, numbers: Mapping[str, int]
    ) -> Prepared | None:
        """Return ids, and the answer's first and last token, (2,); None if it is cut off."""
        ids = tokenizer.encode(example.text)
        offset = len(example.question) + 1
        places = Places(ids, tokenizer, example.text)
        span = places.tokens(offset + example.start, offset + example.end)
        if span[1] >= context:
            return None
        return Prepared((ids[:context],), np.array(span), cut=len(ids) > context)

    def head(self, gpt: GPT, labels: Sequence[str]) -> Head:
        """Return a finder of spans."""
        return SpanFinder(gpt)

    def judge(self, head: Head, batch: Sequence[Tensor]) -> Right:
        """Count spans found exactly, token for token."""
        ids, lengths, spans = batch
        right = (best_spans(head(ids, lengths)) == spans).all(-1)
        return Right(int(right.sum()), len(spans))

    def show(self, head: Head, example: Question, prepared: Prepared, tokenizer: Tokenizer) -> str:
        """Return the question and what was found."""
        ids = prepared.rows[0]
        scores = head(torch.tensor([ids], device=head.gpt.wte.weight.device))
        first, last = best_spans(scores)[0].tolist()
        found = tokenizer.decode(ids[first : last + 1])
        right = [first, last] == prepared.answer.tolist()
        return f"{example.question} -> {found} ({'rightly' if right else 'wrongly'})"
