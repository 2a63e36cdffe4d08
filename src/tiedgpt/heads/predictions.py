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
from tiedgpt.heads.head import Head
from tiedgpt.heads.inputs import pad, read_choices, read_text
from tiedgpt.heads.tasks import MultipleChoice, SequenceClassifier
from tiedgpt.signatures import checked
from tiedgpt.text import Tokenizer
from tiedgpt.weights.source import Source

BATCH_SIZE = 16
RECORD_FIELDS = {
    SequenceClassifier: '{"text": ..}',
    MultipleChoice: '{"text": .., "choices": [..]}',
}
"""The fields of a record, by the head that answers it."""
Prediction = dict[str, Any]


@checked
def open_head(source: str | os.PathLike[str]) -> SequenceClassifier | MultipleChoice:
    """Load a body with the head that `train --task` put on it, in eval mode.

    Raises `UserError` if the source has no such head.
    """
    source = Source.of(source)
    names = source.checkpoint.tensors
    for head_class in (SequenceClassifier, MultipleChoice):
        if head_class.head_tensors[0] in names:
            return head_class.from_pretrained(source)
    raise UserError(
        f"{source} has no head for labels or choices",
        hint="train one with `tiedgpt train --task`; transformers runs heads for tags and spans",
    )


@checked
def predict(
    head: Head,
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
        yield _answer(head, logits) | ({"cut": True} if is_cut else {})


def read_outputs(
    head: Head,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = BATCH_SIZE,
) -> Iterator[tuple[Tensor, bool]]:
    """Yield each record's float32 logits (N,), and whether its text was cut; see `predict`."""
    fields = RECORD_FIELDS.get(type(head))
    if fields is None:
        raise UserError(f"a {type(head).__name__} gives no answers to texts")
    context, is_choice = head.gpt.config.n_positions, isinstance(head, MultipleChoice)
    window = slice(-context, None) if is_choice else slice(context)

    def encode() -> Iterator[list[list[int]]]:
        for number, record in enumerate(records, start=1):
            try:
                texts = read_choices(record) if is_choice else [read_text(record, "text")]
                yield [tokenizer.encode_document(text) for text in texts]
            except UserError as error:
                raise UserError(f"record {number}: {error}; one is {fields}") from None

    examples = encode()
    while batch := list(islice(examples, batch_size)):
        rows = [[ids[window] for ids in example] for example in batch]
        for example, logits in zip(batch, _compute_logits(head, rows), strict=True):
            yield logits.float(), max(map(len, example)) > context


@torch.no_grad()
def _compute_logits(head: Head, examples: list[list[list[int]]]) -> Iterable[Tensor]:
    """Return the logits of examples, each the ids of one text or of several choices."""

    def pad_on_device(rows: list[list[int]]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(head.gpt.wte.weight.device) for tensor in pad(rows))

    if isinstance(head, SequenceClassifier):
        return head(*pad_on_device([ids for (ids,) in examples]))
    padded = [pad_on_device(choices) for choices in examples]
    return [head(ids[None], lengths[None])[0] for ids, lengths in padded]


def _answer(head: Head, logits: Tensor) -> Prediction:
    """Return the answer that the logits (N,) of a record mean."""
    if not isinstance(head, SequenceClassifier):
        probabilities = logits.softmax(-1)
        best = int(probabilities.argmax())
        return {
            "predicted": best,
            "probability": float(probabilities[best]),
            "probabilities": probabilities.tolist(),
        }
    by_label = dict(zip(head.labels, head.scores(logits).tolist(), strict=True))
    if head.problem_type == "regression":
        return {"predicted": by_label if len(by_label) > 1 else by_label[head.labels[0]]}
    label = max(by_label, key=by_label.__getitem__)
    return {"predicted": label, "probability": by_label[label], "probabilities": by_label}
