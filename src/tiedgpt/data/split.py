"""Which documents train and which validate: decided by what they say, never by a seed.

A corpus comes in; `plan_split` reads it once for lengths and digests, and the `Split` it returns
yields (side, document) pairs in the corpus' order. Runs with different seeds thus share one
validation set, and their losses can be compared.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tiedgpt.data.corpus import Corpus, Document
from tiedgpt.errors import UserError

Side = Literal["train", "val"]

TARGET = 0.10  # of all characters go to validation,
AT_LEAST = 0.05  # or else documents are cut,
AT_MOST = 0.20  # and a document that would go beyond this stays in training


@dataclass(frozen=True)
class Split:
    """A decided split; iterating it reads the corpus once and yields every document's side."""

    corpus: Corpus
    validation: Corpus | None
    """A corpus of its own for validation, as the user named it."""
    held_out: frozenset[bytes]
    """SHA-256 of the texts that are not trained on."""
    is_cut: bool
    """Every document trains with its first nine tenths and validates with its last."""
    characters: int
    """Characters of both sides together."""

    def __iter__(self) -> Iterator[tuple[Side, Document]]:
        """Yield each document, or each of its two parts, with its side."""
        for document in self.corpus:
            if self.is_cut:
                yield from _cut(document)
            elif digest(document.text) not in self.held_out:
                yield "train", document
            elif self.validation is None:
                yield "val", document
        for document in self.validation or ():
            yield "val", document


def plan_split(corpus: Corpus, validation: Corpus | None = None) -> Split:
    """Return a split of a corpus into training and validation, by document.

    Documents are taken for validation in the order of their SHA-256 until they have a tenth of all
    characters; none is taken that would make it more than a fifth. Where that gives less than a
    twentieth (one long text, a few equal ones) every document gives its last tenth, cut at a line
    break if one is near. Equal documents are always on the same side. With `validation` all of the
    corpus trains, except documents that are also in `validation`.

    Raises:
        UserError: no text would be left to train on, or there is none to validate on.
    """
    sizes = _sizes(corpus)
    if validation is not None:
        held_out = _sizes(validation)
        total = sum(n for key, n in sizes.items() if key not in held_out)
        if not total:
            raise UserError("every training document is also validation text: name other text")
        if not held_out:
            raise UserError("the validation text is empty: name a file with text")
        total += sum(held_out.values())
        return Split(corpus, validation, frozenset(held_out), is_cut=False, characters=total)
    total, taken = sum(sizes.values()), 0
    chosen = set()
    for key in sorted(sizes):
        if taken < TARGET * total and taken + sizes[key] <= AT_MOST * total:
            chosen.add(key)
            taken += sizes[key]
    is_cut = taken < AT_LEAST * total
    if total < 2:
        raise UserError(
            f"{total} characters cannot be split into training and validation: give more text"
        )
    return Split(corpus, None, frozenset() if is_cut else frozenset(chosen), is_cut, total)


def digest(text: str) -> bytes:
    """Return the SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).digest()


def _sizes(corpus: Corpus) -> dict[bytes, int]:
    """Return the characters that each distinct text has, all its copies together."""
    sizes: dict[bytes, int] = {}
    for document in corpus:
        key = digest(document.text)
        sizes[key] = sizes.get(key, 0) + len(document.text)
    return sizes


def _cut(document: Document) -> Iterator[tuple[Side, Document]]:
    """Yield the first nine tenths of a document for training, the rest for validation."""
    at = _place_to_cut(document.text)
    yield "train", Document(document.name, document.text[:at])
    if at < len(document.text):
        yield "val", Document(f"{document.name} (end)", document.text[at:])


def _place_to_cut(text: str) -> int:
    """Return the line break nearest to nine tenths if one is within a twentieth, else just that."""
    at = max(1, len(text) - max(1, len(text) // 10))
    reach = len(text) // 20
    before = text.rfind("\n", at - reach, at) + 1
    after = text.find("\n", at, at + reach) + 1
    near = [place for place in (before, after) if 0 < place < len(text)]
    return min(near, key=lambda place: abs(place - at), default=at)
