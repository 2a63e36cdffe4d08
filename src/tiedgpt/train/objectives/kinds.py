"""The four kinds of labelled examples: what a line says, and what is right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.core.loss import IGNORED
from tiedgpt.errors import UserError
from tiedgpt.heads import (
    Head,
    MultipleChoice,
    SequenceClassifier,
    SpanFinder,
    TokenClassifier,
    best_spans,
    pad,
)
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Arrays
from tiedgpt.train.objectives.labelled import Example, Labelled, Row

OUTSIDE = "O"
"""The label of what no span covers."""


class Classify(Labelled):
    """{"text": "...", "label": "name or number"}; of a long text the beginning is taken."""

    fields = '{"text": ..., "label": ...}'
    head_class = SequenceClassifier
    use = 'head.labels[head(*pad([tokenizer.encode("a text")])).argmax()]'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return text and label."""
        text = text_in(record, "text")
        return Example((text,), labels=(label_name(record.get("label")),))

    def prepare(self, example: Example) -> Row:
        """Return the text's ids and the label's number, ()."""
        ids = self.tokenizer.encode(example.texts[0])
        answer = np.array(self.numbers[example.labels[0]])
        return Row((ids[: self.context],), answer, cut=len(ids) > self.context)

    def said(self, head: SequenceClassifier, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the label that scores highest, and the text."""
        return f"{head.labels[int(head(*batch[:2]).argmax())]}: {example.texts[0]}"


class Tag(Labelled):
    """A label for each word, or for spans of a text; of a long text the beginning is taken.

    {"tokens": ["Ada", "went", "home"], "labels": ["PERSON", "O", "O"]}   a label for each word
    {"text": "Ada went home", "labels": [[0, 3, "PERSON"]]}               from, to, label

    A word's label stands at its last token, the first that has seen all of it. In a text every
    token that has a part of a span bears its label, and every other one "O".
    """

    fields = '{"tokens": [...], "labels": [...]} or {"text": ..., "labels": [[from, to, label]]}'
    head_class = TokenClassifier
    use = '[head.labels[n] for n in head(pad([tokenizer.encode("a text")])[0])[0].argmax(-1)]'
    measure = "accuracy by label"

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return words, or a text with spans, (from, to, label), and their labels."""
        if "tokens" not in record:
            text = text_in(record, "text")
            spans = tuple(_spans(record.get("labels"), len(text)))
            return Example((text,), spans, (OUTSIDE, *(name for _, _, name in spans)))
        words, labels = list_in(record, "tokens"), list_in(record, "labels")
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise UserError(f"{word!r} in 'tokens' is no word")
        if len(words) != len(labels):
            raise UserError(f"{len(words)} tokens and {len(labels)} labels: each needs one")
        return Example((" ".join(words),), tuple(words), tuple(map(label_name, labels)))

    def prepare(self, example: Example) -> Row | None:
        """Return ids and for each the number of its label, (T,), or -100."""
        numbers = self.numbers
        if example.answer and isinstance(example.answer[0], str):
            ids, answer = [], []
            for at, (word, name) in enumerate(zip(example.answer, example.labels, strict=True)):
                pieces = self.tokenizer.encode(f" {word}" if at else word)
                ids += pieces
                answer += [IGNORED] * (len(pieces) - 1) + [numbers[name]]
        else:
            (text,) = example.texts
            ids = self.tokenizer.encode(text)
            answer = [numbers[OUTSIDE]] * len(ids)
            spans = [span for *span, _ in example.answer]
            found = token_spans(ids, self.tokenizer, text, spans)
            for (first, last), (*_, name) in zip(found, example.answer, strict=True):
                answer[first : last + 1] = [numbers[name]] * (last + 1 - first)
        cut = len(ids) > self.context
        ids, answer = ids[: self.context], answer[: self.context]
        if all(number == IGNORED for number in answer):
            return None
        return Row((ids,), np.array(answer), cut)

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return ids (B, T), labels (B, T)."""
        ids, _ = pad([row.rows[0] for row in rows])
        labels, _ = pad([row.answer.tolist() for row in rows], pad_id=IGNORED)
        return ids.numpy(), labels.numpy()

    def right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return where labels score highest, of tokens that have one."""
        ids, labels = batch
        return (head(ids).argmax(-1) == labels)[labels != IGNORED]

    def said(self, head: TokenClassifier, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the text with the label of each token that asks for one, but "O"."""
        (ids,), (asked,) = (tensor.tolist() for tensor in batch)
        names = [head.labels[number] for number in head(batch[0])[0].argmax(-1).tolist()]
        return "".join(
            self.tokenizer.decode([id]) + (f"[{name}]" if n != IGNORED and name != OUTSIDE else "")
            for id, name, n in zip(ids, names, asked, strict=True)
        )


class Choose(Labelled):
    """{"text": "...", "choices": ["...", ...], "answer": 0}; of a long text the end is taken.

    The language term of the loss counts text with its right continuation: what is wrong is not
    learned as language.
    """

    fields = '{"text": ..., "choices": [...], "answer": 0}'
    head_class = MultipleChoice
    use = 'head(*(x[None] for x in pad([tokenizer.encode(t) for t in ("a b", "a c")]))).argmax()'

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return the text with each continuation, and the number of the right one."""
        text, choices = text_in(record, "text"), list_in(record, "choices")
        for choice in choices:
            if not isinstance(choice, str) or not choice.strip():
                raise UserError(f"{choice!r} in 'choices' is no text")
        if len(choices) < 2:
            raise UserError("one choice leaves nothing to choose", hint="give two or more")
        answer = record.get("answer")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise UserError(
                f"the answer {answer!r} is no number of a choice, 0 to {len(choices) - 1}"
            )
        spaced = text[-1].isspace()
        whole = (text + ("" if spaced or c[0].isspace() else " ") + c for c in choices)
        return Example(tuple(whole), answer)

    def prepare(self, example: Example) -> Row | None:
        """Return a row of ids for each choice, and the number of the right one, ()."""
        rows = [self.tokenizer.encode(text) for text in example.texts]
        cut = max(map(len, rows)) > self.context
        rows = [row[-self.context :] for row in rows]
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

    def said(self, head: MultipleChoice, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the choice that scores highest, after the text."""
        return example.texts[int(head(*batch[:2]).argmax())]


class Answer(Labelled):
    """Where in a text the answer to a question stands; of a long text the beginning is taken.

    {"question": "...", "context": "...", "answer": "..."}              where it first stands
    {"question": "...", "context": "...", "start": 12, "end": 20}       from, to: characters

    The question comes first, then a line break, then the context: what is read later has seen it.
    """

    fields = '{"question": ..., "context": ..., "answer": ...} or with "start" and "end"'
    head_class = SpanFinder
    use = 'best_spans(head(*pad([tokenizer.encode("question\\ncontext")])))  # tokens: first, last'
    measure = "exact match"

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return question and context as one text, and the answer's characters in it."""
        question, context = text_in(record, "question"), text_in(record, "context")
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
        offset = len(question) + 1
        return Example((f"{question}\n{context}",), (offset + start, offset + end))

    def prepare(self, example: Example) -> Row | None:
        """Return ids, and the answer's first and last token, (2,); None if it is cut off."""
        (text,) = example.texts
        ids = self.tokenizer.encode(text)
        (span,) = token_spans(ids, self.tokenizer, text, [example.answer])
        if span[1] >= self.context:
            return None
        return Row((ids[: self.context],), np.array(span), cut=len(ids) > self.context)

    def right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return which spans are found exactly, token for token."""
        ids, lengths, spans = batch
        return (best_spans(head(ids, lengths)) == spans).all(-1)

    def said(self, head: SpanFinder, example: Example, batch: Sequence[Tensor]) -> str:
        """Return what was found, and the text."""
        first, last = best_spans(head(*batch[:2]))[0].tolist()
        found = self.tokenizer.decode(batch[0][0, first : last + 1].tolist())
        return f"{found}: {example.texts[0]}"


def token_spans(
    ids: Sequence[int], tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the first and the last token that have a byte of characters [start, end).

    Raises `UserError` where the tokens are not the text byte for byte.
    """
    pieces = [tokenizer.token_bytes(id) for id in ids]
    if b"".join(pieces) != text.encode():
        raise UserError("the tokenizer does not keep this text as it is: no place can be found")
    starts = list(accumulate(map(len, pieces[:-1]), initial=0))  # in bytes
    for start, end in spans:
        first, after = len(text[:start].encode()), len(text[:end].encode())
        yield bisect_right(starts, first) - 1, bisect_right(starts, after - 1) - 1


def text_in(record: Mapping[str, Any], field: str) -> str:
    """Return a string with something in it, or say that there is none."""
    value = record.get(field)
    if not isinstance(value, str):
        held = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"no string in the field {field!r}; it holds {held}")
    if not value.strip():
        raise UserError(f"the field {field!r} is empty")
    return value


def list_in(record: Mapping[str, Any], field: str) -> list[Any]:
    """Return a list with something in it, or say that there is none."""
    value = record.get(field)
    if not isinstance(value, list) or not value:
        raise UserError(f"no list in the field {field!r}")
    return value


def label_name(value: Any) -> str:
    """Return a label's name; numbers may be labels, too."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise UserError(f"the label {value!r} is neither a name nor a whole number")
    return str(value)


def _spans(labels: Any, n_characters: int) -> list[tuple[int, int, str]]:
    """Return labels of spans of a text in order; they may not overlap."""
    if not isinstance(labels, list):
        raise UserError("no list in the field 'labels'")
    spans = []
    for given in labels:
        if (
            not isinstance(given, list)
            or len(given) != 3
            or not all(type(place) is int for place in given[:2])
            or not 0 <= given[0] < given[1] <= n_characters
        ):
            raise UserError(
                f"the label {given!r} is no [from, to, label] of the text's {n_characters} "
                "characters"
            )
        spans.append((given[0], given[1], label_name(given[2])))
    spans.sort()
    for (_, end, _), (first, _, _) in pairwise(spans):
        if first < end:
            raise UserError(f"two labels share the character {first}: each has one")
    return spans
