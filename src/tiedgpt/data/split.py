"""Split documents into training and validation by their content, never by a seed.

`plan_split` reads a corpus once for lengths and digests. The `Split` that it returns yields
(side, document) pairs in the order of the corpus. Runs with different seeds have the same
validation set, so their losses can be compared.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tiedgpt.data.corpus import Corpus, Document
from tiedgpt.errors import UserError

Side = Literal["train", "val"]
SIDES: tuple[Side, ...] = "train", "val"

TARGET_SHARE = 0.10
"""Share of all characters that validates."""
MIN_SHARE = 0.05
"""Share below which the last tenth of every document validates instead."""
MAX_SHARE = 0.20
"""Share that a single document may not push validation above."""


@dataclass(frozen=True)
class Threshold:
    """The set of the lowest digests: a share of all possible ones, chosen without reading."""

    share: float

    def __contains__(self, digest: object) -> bool:
        assert isinstance(digest, bytes)
        return int.from_bytes(digest[:8]) < self.share * 2**64


@dataclass(frozen=True)
class Split:
    """A planned split. Iterating it reads the corpus once and yields every document's side."""

    corpus: Corpus
    validation: Corpus | None
    """The corpus that validates; None if a part of `corpus` does."""
    held_out: frozenset[bytes] | Threshold
    """SHA-256 digests of the texts that are not trained on."""
    is_cut: bool
    """Whether the last tenth of every document validates."""
    characters: int
    """Characters of both sides together."""
    left_out: tuple[str, ...] = ()
    """Names of the training documents that are also in `validation`."""

    def __iter__(self) -> Iterator[tuple[Side, Document]]:
        """Yield each document, or each of its two parts, with its side."""
        for document in self.corpus:
            if self.is_cut:
                yield from _cut(document)
            elif document.digest not in self.held_out:
                yield "train", document
            elif self.validation is None:
                yield "val", document
        for document in self.validation or ():
            yield "val", document

    def notes(self) -> list[str]:
        """Return a note on the documents that are left out, if there are any."""
        count, names = len(self.left_out), ", ".join(self.left_out[:3])
        more = ", ..." * (count > 3)
        documents = "document is" if count == 1 else "documents are"
        note = f"{count:,} {documents} also in --val and not trained on: {names}{more}"
        return [note] if count else []


def plan_split(
    corpus: Corpus, validation: Corpus | None = None, *, share: float | None = None
) -> Split:
    """Return a split of a corpus into training and validation, by document.

    Documents join validation in the order of their SHA-256, up to a tenth of all characters, except
    those that would make it more than a fifth. If the result is below a twentieth (one long text, a
    few equal ones), the last tenth of every document validates, cut near a line break. Equal
    documents are always on the same side.
    With `validation`, the whole corpus trains, except documents that are also in `validation`.
    With `share`, the corpus is not read: the documents with the lowest digests validate.

    Raises:
        UserError: no text would be left to train on, or there is none to validate on.
    """
    if validation is not None:
        held_out = _sizes(validation)
        if not held_out:
            raise UserError("the validation text is empty", hint="name a file with text")
        digests = frozenset(held_out)
        if share is not None:
            return Split(corpus, validation, digests, is_cut=False, characters=0)
        total, left_out = 0, list[str]()
        for document in corpus:
            if document.digest in digests:
                left_out.append(document.name)
            else:
                total += len(document.text)
        if not total:
            raise UserError(
                "every training document is also validation text", hint="name other text"
            )
        total += sum(held_out.values())
        return Split(corpus, validation, digests, False, total, tuple(left_out))
    if share is not None:
        return Split(corpus, None, Threshold(share), is_cut=False, characters=0)
    sizes = _sizes(corpus)
    total, taken = sum(sizes.values()), 0
    chosen = set()
    for key in sorted(sizes):
        if taken < TARGET_SHARE * total and taken + sizes[key] <= MAX_SHARE * total:
            chosen.add(key)
            taken += sizes[key]
    is_cut = taken < MIN_SHARE * total
    if total < 2:
        raise UserError(
            f"{total} characters cannot be split into training and validation",
            hint="give more text",
        )
    return Split(corpus, None, frozenset() if is_cut else frozenset(chosen), is_cut, total)


def _sizes(corpus: Corpus) -> Counter[bytes]:
    """Return the number of characters of each distinct text, all its copies together."""
    sizes = Counter[bytes]()
    for document in corpus:
        sizes[document.digest] += len(document.text)
    return sizes


def _cut(document: Document) -> Iterator[tuple[Side, Document]]:
    """Yield the first nine tenths of a document for training, the rest for validation.

    The cut is at the line break nearest to nine tenths within a twentieth of the length, if any.
    """
    text = document.text
    at = max(1, len(text) - max(1, len(text) // 10))
    reach = len(text) // 20
    breaks = text.rfind("\n", at - reach, at) + 1, text.find("\n", at, at + reach) + 1
    near = [cut for cut in breaks if 0 < cut < len(text)]
    at = min(near, key=lambda cut: abs(cut - at), default=at)
    yield "train", Document(document.name, text[:at])
    if at < len(text):
        yield "val", Document(f"{document.name} (end)", text[at:])
