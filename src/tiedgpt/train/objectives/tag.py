"""Tagging: a label for each word, or for spans of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.core.loss import IGNORED
from tiedgpt.errors import UserError
from tiedgpt.heads import Head, TokenClassifier, pad
from tiedgpt.heads.inputs import find_token_spans, read_list, read_text, read_texts, word_ids
from tiedgpt.heads.predictions import OUTSIDE
from tiedgpt.train.objective import Arrays
from tiedgpt.train.objectives.labelled import Example, Labelled, Row, read_label


class Tag(Labelled):
    """A label for each word, or for spans of a text; of a long text the beginning is taken.

    {"tokens": ["Ada", "went", "home"], "labels": ["PERSON", "O", "O"]}   a label for each word
    {"text": "Ada went home", "labels": [[0, 3, "PERSON"]]}               from, to, label

    A word's label stands at its last token, the first that has seen all of it. In a text every
    token that has a part of a span bears its label, and every other one "O".
    """

    fields = '{"tokens": [...], "labels": [...]} or {"text": ..., "labels": [[from, to, label]]}'
    head_class = TokenClassifier
    pipeline = "token-classification"
    use = '[head.labels[n] for n in head(pad([tokenizer.encode("a text")])[0])[0].argmax(-1)]'
    measure = "accuracy by label"

    @staticmethod
    def parse(record: Mapping[str, Any]) -> Example:
        """Return words, or a text with spans, (from, to, label), and their labels."""
        if "tokens" not in record:
            text = read_text(record, "text")
            spans = tuple(_read_spans(record.get("labels"), len(text)))
            return Example((text,), spans, (OUTSIDE, *(name for _, _, name in spans)))
        words, labels = read_texts(record, "tokens"), read_list(record, "labels")
        if len(words) != len(labels):
            raise UserError(f"{len(words)} tokens and {len(labels)} labels: each needs one")
        return Example((" ".join(words),), tuple(words), tuple(map(read_label, labels)))

    def encode(self, example: Example, context: int) -> Row | None:
        """Return ids and for each the number of its label, (T,), or -100."""
        numbers = self.numbers
        if example.answer and isinstance(example.answer[0], str):
            ids, places = word_ids(self.tokenizer, example.answer)
            answer = [IGNORED] * len(ids)
            for at, name in zip(places, example.labels, strict=True):
                answer[at] = numbers[name]
        else:
            (text,) = example.texts
            ids = self.tokenizer.encode(text)
            answer = [numbers[OUTSIDE]] * len(ids)
            spans = [span for *span, _ in example.answer]
            found = find_token_spans(ids, self.tokenizer, text, spans)
            for (first, last), (*_, name) in zip(found, example.answer, strict=True):
                answer[first : last + 1] = [numbers[name]] * (last + 1 - first)
        cut = len(ids) > context
        ids, answer = ids[:context], answer[:context]
        if all(number == IGNORED for number in answer):
            return None
        return Row((ids,), np.array(answer), cut)

    def collate(self, rows: Sequence[Row]) -> Arrays:
        """Return ids (B, T), labels (B, T)."""
        ids, _ = pad([row.rows[0] for row in rows])
        labels, _ = pad([row.answer.tolist() for row in rows], pad_id=IGNORED)
        return ids.numpy(), labels.numpy()

    def is_right(self, head: Head, batch: Sequence[Tensor]) -> Tensor:
        """Return where labels score highest, of tokens that have one."""
        ids, labels = batch
        return (head(ids).argmax(-1) == labels)[labels != IGNORED]

    def answer(self, head: TokenClassifier, example: Example, batch: Sequence[Tensor]) -> str:
        """Return the text with the label of each token that asks for one, but "O"."""
        (ids,), (asked,) = (tensor.tolist() for tensor in batch)
        names = [head.labels[number] for number in head(batch[0])[0].argmax(-1).tolist()]
        return "".join(
            self.tokenizer.decode([id]) + (f"[{name}]" if n != IGNORED and name != OUTSIDE else "")
            for id, name, n in zip(ids, names, asked, strict=True)
        )


def _read_spans(labels: Any, n_characters: int) -> list[tuple[int, int, str]]:
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
        spans.append((given[0], given[1], read_label(given[2])))
    spans.sort()
    for (_, end, _), (first, _, _) in pairwise(spans):
        if first < end:
            raise UserError(f"two labels share the character {first}: each has one")
    return spans
