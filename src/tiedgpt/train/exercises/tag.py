"""A label for each word, or for stretches of a text.

    {"tokens": ["Ada", "went", "home"], "labels": ["PERSON", "O", "O"]}     a label for each word
    {"text": "Ada went home", "labels": [[0, 3, "PERSON"]]}                 from, to, label

A word's label stands at its last token, the first that has seen all of it. In a text every token
that has a part of a stretch bears its label, and every other one "O".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, TokenClassifier, pad
from tiedgpt.text import Tokenizer
from tiedgpt.train.exercises.exercise import (
    UNANSWERED,
    Exercise,
    Malformed,
    Places,
    Prepared,
    Right,
    label_name,
    list_in,
    text_in,
)
from tiedgpt.train.task import Arrays

OUTSIDE = "O"
"""The label of what no stretch covers."""


@dataclass(frozen=True)
class Words:
    """Words and a label for each."""

    words: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """The words with blanks between them."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Stretches:
    """A text, and labels of stretches of it: (first character, character after the last, label)."""

    text: str
    stretches: tuple[tuple[int, int, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The labels, with that of everything else."""
        return (OUTSIDE, *(name for _, _, name in self.stretches))


class Tag(Exercise):
    """Labels of words or of stretches; of a long text the beginning is taken."""

    fields = '{"tokens": [...], "labels": [...]} or {"text": ..., "labels": [[from, to, label]]}'
    head_class = TokenClassifier
    use = '[head.labels[n] for n in head(pad([tokenizer.encode("a text")])[0])[0].argmax(-1)]'
    measure = "accuracy by label"

    def parse(self, record: Mapping[str, Any]) -> Words | Stretches:
        """Return words, or a text, with their labels."""
        if "tokens" not in record:
            return _stretches(record)
        words, labels = list_in(record, "tokens"), list_in(record, "labels")
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise Malformed(f"{word!r} in 'tokens' is no word")
        if len(words) != len(labels):
            raise Malformed(f"{len(words)} tokens and {len(labels)} labels: each needs one")
        return Words(tuple(words), tuple(map(label_name, labels)))

    def texts(self, example: Words | Stretches) -> Iterable[str]:
        """Return the text."""
        return (example.text,)

    def labels(self, example: Words | Stretches) -> Iterable[str]:
        """Return the labels."""
        return example.names

    def prepare(
        self,
        example: Words | Stretches,
        tokenizer: Tokenizer,
        context: int,
        numbers: Mapping[str, int],
    ) -> Prepared | None:
        """Return ids and for each the number of its label, (T,), or -100."""
        if isinstance(example, Words):
            ids, answer = [], []
            for at, (word, name) in enumerate(zip(example.words, example.names, strict=True)):
                pieces = tokenizer.encode(f" {word}" if at else word)
                ids += pieces
                answer += [UNANSWERED] * (len(pieces) - 1) + [numbers[name]]
        else:
            ids = tokenizer.encode(example.text)
            answer = [numbers[OUTSIDE]] * len(ids)
            places = Places(ids, tokenizer, example.text)
            for start, end, name in example.stretches:
                first, last = places.tokens(start, end)
                answer[first : last + 1] = [numbers[name]] * (last + 1 - first)
        cut = len(ids) > context
        ids, answer = ids[:context], answer[:context]
        if all(number == UNANSWERED for number in answer):
            return None
        return Prepared((ids,), np.array(answer), cut)

    def head(self, gpt: GPT, labels: Sequence[str]) -> Head:
        """Return a token classifier."""
        return TokenClassifier(gpt, labels)

    def collate(self, rows: Sequence[Prepared]) -> Arrays:
        """Return ids (B, T), labels (B, T)."""
        ids, _ = pad([row.rows[0] for row in rows])
        labels, _ = pad([row.answer.tolist() for row in rows], pad_id=UNANSWERED)
        return ids.numpy(), labels.numpy()

    def judge(self, head: Head, batch: Sequence[Tensor]) -> Right:
        """Count labels that score highest."""
        ids, labels = batch
        asked = labels != UNANSWERED
        right = (head(ids).argmax(-1) == labels) & asked
        return Right(int(right.sum()), int(asked.sum()))

    def show(
        self,
        head: Head,
        example: Words | Stretches,
        prepared: Prepared,
        tokenizer: Tokenizer,
    ) -> str:
        """Return the text with the label of each token that asks for one, but "O"."""
        assert isinstance(head, TokenClassifier)
        ids = prepared.rows[0]
        (scores,) = head(torch.tensor([ids], device=head.classifier.weight.device))
        text = ""
        for id, said, asked in zip(ids, scores.argmax(-1).tolist(), prepared.answer, strict=True):
            name = head.labels[said]
            text += tokenizer.decode([id])
            text += f"[{name}]" if asked != UNANSWERED and name != OUTSIDE else ""
        return text


def _stretches(record: Mapping[str, Any]) -> Stretches:
    text = text_in(record, "text")
    stretches = []
    if not isinstance(record.get("labels"), list):
        raise Malformed("no list in the field 'labels'")
    for given in record["labels"]:
        if (
            not isinstance(given, list)
            or len(given) != 3
            or not all(type(place) is int for place in given[:2])
            or not 0 <= given[0] < given[1] <= len(text)
        ):
            raise Malformed(
                f"the label {given!r} is no [from, to, label] of the text's {len(text)} characters"
            )
        stretches.append((given[0], given[1], label_name(given[2])))
    stretches.sort()
    for (_, end, _), (first, _, _) in pairwise(stretches):
        if first < end:
            raise Malformed(f"two labels share the character {first}: each has one")
    return Stretches(text, tuple(stretches))
