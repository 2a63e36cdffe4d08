"""Encode a split of documents into a directory of token shards.

Documents and a tokenizer come in. `train_000000.bin`, `val_000000.bin`, ... and `manifest.json` go
out, in a directory that appears by one rename once everything in it is on the disk. The manifest
has the sizes of both sides, notes on the texts, and the size and sha256 of every file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiedgpt.data.shards import TOKENS_PER_SHARD, Shards, ShardWriter
from tiedgpt.data.split import SIDES, Side, Split
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import PREPARED, read_json, replacing, write_json

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

SAMPLE_TOKENS = 50_000
"""Number of tokens that `note_split_characters` reads."""
MAX_SPLIT_SHARE = 0.5
"""Largest share of split characters that is not noted."""
MANIFEST = "manifest.json"


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


def encode_corpus(
    split: Split,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedCorpus:
    """Encode both sides of a split into the shards of a new directory.

    The tokenizer's end-of-text token, if there is one, follows every document. `progress` is called
    after each document with the number of encoded characters and their total.

    Raises:
        UserError: the directory exists and is not empty, a side has no tokens, or the vocabulary
            does not fit 16 bits.
        NoRoomError: the disk is full; nothing is left of the attempt.
        CorruptInputError: a document cannot be read (see `documents`).
    """
    directory = Path(directory)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} exists already: remove it or name another directory")
    with replacing(directory) as temporary:
        temporary.mkdir()
        counts = write_shards(
            split, tokenizer, temporary, tokens_per_shard=tokens_per_shard, progress=progress
        )
        files = {path.name: identify(path) for path in temporary.iterdir()}
        write_manifest(temporary, counts, files)
    return open_encoded(directory)


def write_shards(
    split: Split,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Side, Counts]:
    """Encode a split into shards in a directory; return the sizes of its sides.

    The arguments and the errors are those of `encode_corpus`; a side may have no tokens.
    """
    counts = dict.fromkeys(SIDES, Counts())
    eos = tokenizer.eos_token_id
    end = np.array([] if eos is None else [eos], dtype=np.uint32)
    size = {"vocab_size": len(tokenizer), "tokens_per_shard": tokens_per_shard}
    done = 0
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(ShardWriter(directory, side, **size)) for side in SIDES
        }
        for side, document in split:
            writer = writers[side]
            writer.write(tokenizer.encode_array(document.text))
            writer.write(end)
            counts[side] = Counts(
                documents=counts[side].documents + 1,
                characters=counts[side].characters + len(document.text),
                utf8_bytes=counts[side].utf8_bytes + len(document.text.encode()),
                tokens=writer.n_tokens,
            )
            done += len(document.text)
            if progress is not None:
                progress(done, split.characters)
    return counts


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
