"""Split documents into training and validation, and encode both into token shards.

The content of the documents decides the split, never a seed: runs with different seeds have the
same validation set, so their losses can be compared. `plan_split` reads a corpus once for lengths
and digests. The `Split` that it returns yields (side, document) pairs in the order of the corpus.

Documents and a tokenizer come in. `train_000000.bin`, `val_000000.bin`, ... and `manifest.json` go
out, in a directory that appears by one rename once everything in it is on the disk. The manifest
has the sizes of both sides, notes on the texts, and the size and sha256 of every file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tiedgpt.data.corpus import Corpus, Document
from tiedgpt.data.remarks import note_special_tokens, special_token_finder
from tiedgpt.data.shards import TOKENS_PER_SHARD, Shards, ShardWriter
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import PREPARED, list_some, read_json, replacing, write_json
from tiedgpt.signatures import checked

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

Side = Literal["train", "val"]
SIDES: tuple[Side, ...] = "train", "val"
TARGET_SHARE = 0.10
"""Target share of the validation side, in characters."""
MIN_SHARE = 0.05
"""Share of the validation side below which the last tenth of every document validates instead."""
MAX_SHARE = 0.20
"""Maximum share of the validation side with whole documents."""
SAMPLE_TOKENS = 50_000
"""Number of tokens that `note_split_characters` reads."""
MAX_SPLIT_SHARE = 0.5
"""Share of split characters above which there is a note."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Threshold:
    """The set of the lowest digests: a share of all possible ones, which needs no reading."""

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
    """SHA-256 digests of the texts that are excluded from training."""
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
        count, names = len(self.left_out), list_some(self.left_out)
        documents = "document is" if count == 1 else "documents are"
        note = f"{count:,} {documents} also in --val and not trained on: {names}"
        return [note] if count else []


@checked
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


@dataclass(frozen=True)
class Counts:
    """The size of one side of the split. `tokens` includes the end-of-text tokens."""

    documents: int = 0
    characters: int = 0
    utf8_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class EncodedCorpus:
    """A directory of shards, and the size of its two sides."""

    directory: Path
    train: Counts
    val: Counts
    files: Mapping[str, list[Any]] = field(repr=False)
    """Size and sha256 of every file, by its path in the directory."""
    notes: Sequence[str] = ()
    """Notes on the texts, for people."""

    def open_shards(self, side: Side) -> Shards:
        """Return the tokens of a side.

        Raises `CorruptInputError` with the name of a file that is missing or has another size.
        """
        sizes = {self.directory / name: size for name, (size, _) in self.files.items()}
        paths = sorted(path for path in sizes if path.match(f"{side}_*.bin"))
        for path in paths:
            if not path.is_file() or path.stat().st_size != sizes[path]:
                hint = "train in another --out"
                if PREPARED in self.files:
                    hint = f"`tiedgpt data verify {self.directory}` says what to do"
                raise CorruptInputError(f"{path} is missing or has changed", hint=hint)
        return Shards(paths)


@checked
def encode_corpus(
    split: Split,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> EncodedCorpus:
    """Encode both sides of a split into the shards of a new directory.

    The tokenizer's `begin_ids` precede every document, and its end-of-text token, if there is one,
    follows.

    Raises:
        UserError: the directory exists and is not empty, a side has no tokens, or the vocabulary
            does not fit 16 bits.
        NoRoomError: the disk is full; nothing is left of the attempt.
        CorruptInputError: a document cannot be read (see `documents`).
    """
    for _ in encode_documents(split, tokenizer, directory, tokens_per_shard=tokens_per_shard):
        pass
    return open_encoded(directory)


def encode_documents(
    split: Split,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> Iterator[tuple[int, int]]:
    """Do what `encode_corpus` does; yield (encoded characters, their total) after each document."""
    directory = Path(directory)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} exists already: remove it or name another directory")
    with replacing(directory) as temporary:
        temporary.mkdir()
        counts, special_tokens = yield from write_shards(
            split, tokenizer, temporary, tokens_per_shard=tokens_per_shard
        )
        files = {path.name: identify(path) for path in temporary.iterdir()}
        write_manifest(temporary, counts, files, note_special_tokens(special_tokens))


def write_shards(
    split: Split,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> Generator[tuple[int, int], None, tuple[dict[Side, Counts], Counter[str]]]:
    """Encode a split into shards in a directory; yield the progress as `encode_documents` does.

    Returns the sizes of its sides, which may have no tokens, and how often the texts spell each
    special token. The arguments and the errors are those of `encode_corpus`.
    """
    counts = dict.fromkeys(SIDES, Counts())
    eos = tokenizer.eos_token_id
    begin = np.array(tokenizer.begin_ids, dtype=np.uint32)
    end = np.array([] if eos is None else [eos], dtype=np.uint32)
    find_special_tokens, special_tokens = special_token_finder(tokenizer), Counter[str]()
    size = {"vocab_size": len(tokenizer), "tokens_per_shard": tokens_per_shard}
    done = 0
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(ShardWriter(directory, side, **size)) for side in SIDES
        }
        for side, document in split:
            writer = writers[side]
            writer.write(begin)
            writer.write(tokenizer.encode_array(document.text))
            writer.write(end)
            special_tokens.update(find_special_tokens(document.text))
            counts[side] = Counts(
                documents=counts[side].documents + 1,
                characters=counts[side].characters + len(document.text),
                utf8_bytes=counts[side].utf8_bytes + len(document.text.encode()),
                tokens=writer.n_tokens,
            )
            done += len(document.text)
            yield done, split.characters
    return counts, special_tokens


def write_manifest(
    directory: Path,
    counts: Mapping[Side, Counts],
    files: Mapping[str, list[int | str]],
    notes: Sequence[str] = (),
) -> None:
    """Write the manifest of a directory; raise `UserError` if a side has no tokens.

    `files` holds the size and the sha256 of every file, by its path in the directory.
    """
    for side in SIDES:
        if not counts[side].tokens:
            raise UserError(
                f"the {side} side of the split has no tokens", hint="give more text, or --val"
            )
    facts: dict[str, Any] = {side: asdict(counts[side]) for side in SIDES}
    facts |= {"notes": [*notes], "files": dict(sorted(files.items()))}
    write_sealed(directory / MANIFEST, facts)


def identify(path: Path) -> list[int | str]:
    """Return the size and the sha256 of a file."""
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


@checked
def open_encoded(directory: str | Path) -> EncodedCorpus:
    """Return the value that `encode_corpus` or `prepare_data` returned for the directory.

    Raises:
        UserError: the directory has no manifest.
        CorruptInputError: its manifest was changed.
    """
    directory = Path(directory)
    if (directory / PREPARED).exists() and not (directory / MANIFEST).exists():
        raise UserError(f"{directory} is not complete", hint="`tiedgpt data prepare` completes it")
    if not (directory / MANIFEST).exists():
        raise UserError(f"{directory} holds no encoded text")
    manifest = read_sealed(directory / MANIFEST)
    train, val = (Counts(**manifest[side]) for side in SIDES)
    return EncodedCorpus(directory, train, val, manifest["files"], manifest["notes"])


def note_split_characters(encoded: EncodedCorpus, tokenizer: Tokenizer) -> list[str]:
    """Return a note if most characters of the training text take several tokens."""
    if encoded.train.tokens <= MAX_SPLIT_SHARE * encoded.train.characters:
        return []  # most characters share a token with others
    shards = encoded.open_shards("train")
    sample = shards.read(0, min(SAMPLE_TOKENS, len(shards))).tolist()
    counts = Counter(tokenizer.decode(id for id in sample if id != tokenizer.eos_token_id))
    n_split = sum(n for letter, n in counts.items() if len(tokenizer.encode_array(letter)) > 1)
    share = n_split / max(1, counts.total())
    if share <= MAX_SPLIT_SHARE:
        return []
    return [
        f"{share:.0%} of the characters have no token of their own in a vocabulary of "
        f"{len(tokenizer):,}: --tokenizer char or a larger --vocab-size gives them one"
    ]


def write_sealed(path: Path, facts: dict[str, Any]) -> None:
    """Write a JSON file that ends with the sha256 of its other fields."""
    write_json(path, {**facts, "sha256": _seal(facts)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the facts of `write_sealed`; raise `CorruptInputError` if one bit has changed."""
    try:
        facts = read_json(path)
        is_intact = facts.pop("sha256", None) == _seal(facts)
    except CorruptInputError:
        is_intact = False
    if not is_intact:
        raise CorruptInputError(
            f"{path} is damaged", hint="delete it, and give the command that prepared it again"
        )
    return facts


def _seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
