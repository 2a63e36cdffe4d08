"""What a trained head says of texts: labels, spans, choices and answers, with probabilities.

head, tokenizer = open_head("runs/names-classify-1"), Tokenizer.from_pretrained(...)
for answer in predict(head, tokenizer, [{"text": "a cat"}, {"text": "a hat"}]):
    print(answer["label"], answer["probability"])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Input:
    """A record as ids: one row, or one for each choice."""

    rows: tuple[list[int], ...]
    text: str = ""
    words: Sequence[str] = ()
    places: Sequence[int] = ()
    """Of words the last tokens; of a text the bytes at which its tokens begin."""
    offset: int = 0
    """Characters of the text before those that are asked about."""
    is_cut: bool = False
    """Whether the model's context is too short for it."""


class Kind(NamedTuple):
    """How a head is asked: the fields of a record, and what reads and answers it."""

    fields: str
    read: Callable[[Record, Tokenizer, int], Input]
    answer: Callable[[Any, list[Input]], list[Answer]]


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

    def read() -> Iterator[Input]:
        for number, record in enumerate(records, start=1):
            try:
                yield kind.read(record, tokenizer, context)
            except UserError as error:
                raise UserError(f"record {number}: {error}; one is {kind.fields}") from None

    each_input = read()
    while inputs := list(islice(each_input, batch_size)):
        with torch.no_grad():
            answers = kind.answer(head, inputs)
        for each, answer in zip(inputs, answers, strict=True):
            yield answer | ({"cut": True} if each.is_cut else {})


def _field(record: Record, name: str, kind: Any = str) -> Any:
    value: Any = record.get(name)
    if not isinstance(value, kind) or not value or (kind is str and not value.strip()):
        what = "text" if kind is str else "list"
        raise UserError(f"no {what} in the field {name!r}")
    if kind is list and not all(isinstance(each, str) and each.strip() for each in value):
        raise UserError(f"{name!r} must be a list of texts")
    return value


def _pad(head: Head, inputs: list[Input]) -> tuple[Tensor, ...]:
    """Return ids (B, T) and lengths (B,) on the head's device."""
    rows = [row for each in inputs for row in each.rows]
    return tuple(tensor.to(head.gpt.wte.weight.device) for tensor in pad(rows))


def _read_text(record: Record, tokenizer: Tokenizer, context: int) -> Input:
    text = _field(record, "text")
    ids = tokenizer.encode(text)
    return Input((ids[:context],), text, is_cut=len(ids) > context)


def _label(head: SequenceClassifier, inputs: list[Input]) -> list[Answer]:
    answers = []
    for probabilities in head(*_pad(head, inputs)).float().softmax(-1).tolist():
        named = dict(zip(head.labels, probabilities, strict=True))
        label = max(named, key=named.__getitem__)
        answers.append({"label": label, "probability": named[label], "probabilities": named})
    return answers


def _read_words(record: Record, tokenizer: Tokenizer, context: int) -> Input:
    if "tokens" in record:
        words = _field(record, "tokens", list)
        ids, last = word_ids(tokenizer, words)
        return Input((ids[:context],), "", words, last, is_cut=len(ids) > context)
    text = _field(record, "text")
    ids = tokenizer.encode(text)
    starts = token_starts(ids, tokenizer, text)
    return Input((ids[:context],), text, places=starts, is_cut=len(ids) > context)


def _tag(head: TokenClassifier, inputs: list[Input]) -> list[Answer]:
    ids, _ = _pad(head, inputs)
    best, numbers = head(ids).float().softmax(-1).max(-1)  # (B, T) twice
    answers = []
    for each, probabilities, labels in zip(inputs, best.tolist(), numbers.tolist(), strict=True):
        n = len(each.rows[0])
        names = [head.labels[number] for number in labels[:n]]
        if each.words:
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


def _read_choices(record: Record, tokenizer: Tokenizer, context: int) -> Input:
    choices = _field(record, "choices", list)
    texts = choice_texts(_field(record, "text"), choices)
    rows = [tokenizer.encode(text) for text in texts]
    is_cut = max(map(len, rows)) > context
    return Input(tuple(row[-context:] for row in rows), words=choices, is_cut=is_cut)


def _choose(head: MultipleChoice, inputs: list[Input]) -> list[Answer]:
    answers = []
    for each in inputs:
        ids, lengths = _pad(head, [each])
        probabilities = head(ids[None], lengths[None])[0].float().softmax(-1)
        best = int(probabilities.argmax())
        answers.append({"choice": best, "probabilities": probabilities.tolist()})
    return answers


def _read_question(record: Record, tokenizer: Tokenizer, context: int) -> Input:
    question, about = _field(record, "question"), _field(record, "context")
    text, offset = question_text(question, about)
    ids = tokenizer.encode(text)
    starts = token_starts(ids, tokenizer, text)
    each = Input((ids[:context],), text, (), starts, offset, is_cut=len(ids) > context)
    if _question_tokens(each) >= context:
        raise UserError(f"the question leaves no room for a text in {context} tokens")
    return each


def _question_tokens(each: Input) -> int:
    """Return how many tokens have no byte of what is searched."""
    begin = len(each.text[: each.offset].encode())
    ends = [*each.places[1:], len(each.text.encode())]
    return sum(end <= begin for end in ends)


def _find(head: SpanFinder, inputs: list[Input]) -> list[Answer]:
    logits = head(*_pad(head, inputs)).float()
    for row, each in zip(logits, inputs, strict=True):
        row[: _question_tokens(each)] = -torch.inf
    spans, likely = best_spans(logits).tolist(), logits.softmax(1)
    answers = []
    for row, each, (first, last) in zip(likely, inputs, spans, strict=True):
        start, end = find_characters(each.places, each.text, first, last)
        start = max(start, each.offset)
        answers.append(
            {
                "from": start - each.offset,
                "to": end - each.offset,
                "text": each.text[start:end],
                "probability": float(row[first, 0] * row[last, 1]),
            }
        )
    return answers


KINDS: dict[type[Head], Kind] = {
    SequenceClassifier: Kind('{"text": ..}', _read_text, _label),
    TokenClassifier: Kind('{"text": ..} or {"tokens": [..]}', _read_words, _tag),
    MultipleChoice: Kind('{"text": .., "choices": [..]}', _read_choices, _choose),
    SpanFinder: Kind('{"question": .., "context": ..}', _read_question, _find),
}
