"""What a trained head says of texts: labels, spans, choices and answers, with probabilities.

head, tokenizer = open_head("runs/names-classify-1"), Tokenizer.from_pretrained(...)
for answer in predict(head, tokenizer, [{"text": "a cat"}, {"text": "a hat"}]):
    print(answer["label"], answer["probability"])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiedgpt.errors import UserError
from tiedgpt.heads.head import Head
from tiedgpt.heads.inputs import (
    choice_texts,
    find_characters,
    question_text,
    read_text,
    read_texts,
    token_starts,
    word_ids,
)
from tiedgpt.heads.kinds import (
    MultipleChoice,
    SequenceClassifier,
    SpanFinder,
    TokenClassifier,
    best_spans,
)
from tiedgpt.heads.padding import pad
from tiedgpt.text import Tokenizer
from tiedgpt.weights.sources import open_checkpoint

BATCH_SIZE = 16
OUTSIDE = "O"
"""The label of what no span covers."""
Record = Mapping[str, Any]
Answer = dict[str, Any]


class Input(NamedTuple):
    """A record as ids: one row, or one for each choice."""

    rows: list[list[int]]
    text: str = ""
    places: Sequence[int] = ()
    """Of words the last tokens; of a text the bytes at which its tokens begin."""
    offset: int = 0
    """Characters of the text before those that are asked about."""


class Kind(NamedTuple):
    """How a head is asked: the fields of a record, and what reads and answers it."""

    fields: str
    read: Callable[[Record, Tokenizer], Input]
    answer: Callable[[Any, list[Input]], list[Answer]]
    keeps_end: bool = False
    """Whether of a text that is too long the end is read."""
    shared: str = ""
    """The field that texts without one of their own may share: "choices", "question"."""
    text: str = "text"
    """The field that holds the text."""


def open_head(source: str | os.PathLike[str]) -> Head:
    """Load a body with the head that `train --task` put on it, in eval mode.

    Raises `UserError` where there is no such head.
    """
    names = open_checkpoint(source).tensors
    for kind in KINDS:
        if kind.own[0] in names:
            return kind.from_pretrained(source)
    raise UserError(
        f"{source} has no head that labels",
        hint="train one with `tiedgpt train --task`, or continue texts with `tiedgpt generate`",
    )


def predict(
    head: Head, tokenizer: Tokenizer, records: Iterable[Record], *, batch_size: int = BATCH_SIZE
) -> Iterator[Answer]:
    """Yield what a head, in eval mode, says of each record, in order.

    SequenceClassifier  {"text"}                  label, probability, probabilities by label
    TokenClassifier     {"text"}                  spans: from, to, label, text, probability
                        {"tokens": [words]}       labels, probabilities
    MultipleChoice      {"text", "choices"}       choice (from 0), probabilities
    SpanFinder          {"question", "context"}   from, to, text, probability

    `from` and `to` count characters. A text that is longer than the context is cut as in training,
    and its answer has `cut`. Raises `UserError` for a record without these fields.
    """
    kind = KINDS.get(type(head))
    if kind is None:
        raise UserError(f"{type(head).__name__} has nothing to say of a text")
    context = head.gpt.config.n_positions
    cut = slice(-context, None) if kind.keeps_end else slice(context)

    def read() -> Iterator[Input]:
        for number, record in enumerate(records, start=1):
            try:
                yield kind.read(record, tokenizer)
            except UserError as error:
                raise UserError(f"record {number}: {error}; one is {kind.fields}") from None

    inputs = read()
    while some := list(islice(inputs, batch_size)):
        with torch.no_grad():
            shortened = [each._replace(rows=[row[cut] for row in each.rows]) for each in some]
            answers = kind.answer(head, shortened)
        for each, answer in zip(some, answers, strict=True):
            is_cut = max(map(len, each.rows)) > context
            yield answer | ({"cut": True} if is_cut else {})


def _pad(head: Head, inputs: list[Input]) -> tuple[Tensor, ...]:
    """Return ids (B, T) and lengths (B,) on the head's device."""
    rows = [row for each in inputs for row in each.rows]
    return tuple(tensor.to(head.gpt.wte.weight.device) for tensor in pad(rows))


def _read_text_record(record: Record, tokenizer: Tokenizer) -> Input:
    return Input([tokenizer.encode(read_text(record, "text"))])


def _label(head: SequenceClassifier, inputs: list[Input]) -> list[Answer]:
    answers = []
    for probabilities in head(*_pad(head, inputs)).float().softmax(-1).tolist():
        named = dict(zip(head.labels, probabilities, strict=True))
        label = max(named, key=named.__getitem__)
        answers.append({"label": label, "probability": named[label], "probabilities": named})
    return answers


def _read_words(record: Record, tokenizer: Tokenizer) -> Input:
    if "tokens" in record:
        ids, last = word_ids(tokenizer, read_texts(record, "tokens"))
        return Input([ids], places=last)
    text = read_text(record, "text")
    ids = tokenizer.encode(text)
    return Input([ids], text, token_starts(ids, tokenizer, text))


def _tag(head: TokenClassifier, inputs: list[Input]) -> list[Answer]:
    ids, _ = _pad(head, inputs)
    best, numbers = head(ids).float().softmax(-1).max(-1)  # (B, T) twice
    answers = []
    for each, probabilities, labels in zip(inputs, best.tolist(), numbers.tolist(), strict=True):
        n = len(each.rows[0])
        names = [head.labels[number] for number in labels[:n]]
        if not each.text:
            seen = [at for at in each.places if at < n]
            likely = [probabilities[at] for at in seen]
            answers.append({"labels": [names[at] for at in seen], "probabilities": likely})
            continue
        spans = []
        for name, run in groupby(range(n), key=names.__getitem__):
            tokens = list(run)
            start, end = find_characters(each.places, each.text, tokens[0], tokens[-1])
            if name != OUTSIDE and start < end:
                mean = sum(probabilities[at] for at in tokens) / len(tokens)
                place = {"from": start, "to": end, "label": name, "text": each.text[start:end]}
                spans.append(place | {"probability": mean})
        answers.append({"spans": spans})
    return answers


def _read_choices(record: Record, tokenizer: Tokenizer) -> Input:
    texts = choice_texts(read_text(record, "text"), read_texts(record, "choices"))
    return Input([tokenizer.encode(text) for text in texts])


def _choose(head: MultipleChoice, inputs: list[Input]) -> list[Answer]:
    answers = []
    for each in inputs:
        ids, lengths = _pad(head, [each])
        probabilities = head(ids[None], lengths[None])[0].float().softmax(-1)
        best = int(probabilities.argmax())
        answers.append({"choice": best, "probabilities": probabilities.tolist()})
    return answers


def _read_question(record: Record, tokenizer: Tokenizer) -> Input:
    text, offset = question_text(read_text(record, "question"), read_text(record, "context"))
    ids = tokenizer.encode(text)
    return Input([ids], text, token_starts(ids, tokenizer, text), offset)


def _find(head: SpanFinder, inputs: list[Input]) -> list[Answer]:
    logits = head(*_pad(head, inputs)).float()
    for row, each in zip(logits, inputs, strict=True):
        begin = len(each.text[: each.offset].encode())
        ends = [*each.places[1:], len(each.text.encode())]
        n_asked = sum(end <= begin for end in ends)  # tokens of the question
        if n_asked >= len(each.rows[0]):
            raise UserError(f"a question of {n_asked} tokens leaves no room for a text")
        row[:n_asked] = -torch.inf
    spans, likely = best_spans(logits).tolist(), logits.softmax(1)
    answers = []
    for row, each, (first, last) in zip(likely, inputs, spans, strict=True):
        start, end = find_characters(each.places, each.text, first, last)
        start = max(start, each.offset)
        place = {"from": start - each.offset, "to": end - each.offset, "text": each.text[start:end]}
        answers.append(place | {"probability": float(row[first, 0] * row[last, 1])})
    return answers


KINDS: dict[type[Head], Kind] = {
    SequenceClassifier: Kind('{"text": ..}', _read_text_record, _label),
    TokenClassifier: Kind('{"text": ..} or {"tokens": [..]}', _read_words, _tag),
    MultipleChoice: Kind('{"text": .., "choices": [..]}', _read_choices, _choose, True, "choices"),
    SpanFinder: Kind(
        '{"question": .., "context": ..}', _read_question, _find, shared="question", text="context"
    ),
}
