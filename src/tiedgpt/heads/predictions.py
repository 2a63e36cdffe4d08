"""The answers of a trained head to texts: labels and choices, with probabilities.

head, tokenizer = open_head("runs/names-classify-1"), Tokenizer.from_pretrained(...)
for answer in predict(head, tokenizer, [{"text": "a cat"}, {"text": "a hat"}]):
    print(answer["predicted"], answer["probability"])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tiedgpt.errors import UserError
from tiedgpt.heads.head import AnsweringHead
from tiedgpt.heads.inputs import format_fields
from tiedgpt.heads.tasks import MultipleChoice, SequenceClassifier
from tiedgpt.signatures import checked
from tiedgpt.text import Tokenizer
from tiedgpt.weights.source import Source

BATCH_SIZE = 16
HEADS: tuple[type[AnsweringHead], ...] = (SequenceClassifier, MultipleChoice)
"""The heads that `open_head` loads."""
ANSWER_FIELDS = ("predicted", "probability", "probabilities", "cut")
"""Fields of an answer of `predict`."""
Prediction = dict[str, Any]


@checked
def open_head(source: str | os.PathLike[str]) -> AnsweringHead:
    """Load a body with the head that `train --task` put on it, in eval mode.

    Raises `UserError` if the source has no such head.
    """
    source = Source.of(source)
    for head_class in HEADS:
        if head_class.matches(source.checkpoint):
            return head_class.from_pretrained(source)
    raise UserError(
        f"{source} has no head for labels or choices",
        hint="train one with `tiedgpt train --task`; transformers runs heads for tags and spans",
    )


@checked
def predict(
    head: AnsweringHead,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Prediction]:
    """Yield the answer of a head, in eval mode, to each record, in order.

    SequenceClassifier  {"text"}              predicted, the likeliest label, its probability, and
                                              probabilities by label
      a regression                            predicted, a number; of several, numbers by label
    MultipleChoice      {"text", "choices"}   predicted, the index of a choice from 0, probability
                                              and probabilities

    The numbers are those of transformers' text-classification pipeline: see
    `SequenceClassifier.scores`. A text that is longer than the context is cut as in training (a
    classifier reads the beginning, a choice the end), and its answer has `cut`. Raises `UserError`
    for a record without these fields.
    """
    for logits, is_cut in read_outputs(head, tokenizer, records, batch_size=batch_size):
        yield head.answer(logits) | ({"cut": True} if is_cut else {})


def read_outputs(
    head: AnsweringHead,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = BATCH_SIZE,
) -> Iterator[tuple[Tensor, bool]]:
    """Yield each record's float32 logits (N,), and whether its text was cut; see `predict`."""
    fields, context = format_fields(head.record_fields), head.gpt.config.n_positions
    window = slice(-context, None) if head.keeps_end else slice(context)

    def encode() -> Iterator[list[list[int]]]:
        for number, record in enumerate(records, start=1):
            try:
                yield [tokenizer.encode_document(text) for text in head.read_texts(record)]
            except UserError as error:
                raise UserError(f"record {number}: {error}; one is {fields}") from None

    examples = encode()
    while batch := list(islice(examples, batch_size)):
        rows = [[ids[window] for ids in example] for example in batch]
        with torch.no_grad():
            outputs = head.compute_logits(rows)
        for example, logits in zip(batch, outputs, strict=True):
            yield logits.float(), max(map(len, example)) > context
