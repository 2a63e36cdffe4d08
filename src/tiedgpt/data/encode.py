"""Encode a split of documents into a directory of token shards.

Documents and a tokenizer come in. `train_000000.bin`, `val_000000.bin`, ... and `counts.json` go
out, in a directory that appears by one rename once everything in it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiedgpt.data.shards import TOKENS_PER_SHARD, Shards, ShardWriter
from tiedgpt.data.split import SIDES, Side, Split
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, replacing, write_json

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

SAMPLE_TOKENS = 50_000
"""Number of tokens that `note_split_characters` reads."""
MAX_SPLIT_SHARE = 0.5
"""Largest share of split characters that is not noted."""
COUNTS = "counts.json"
MANIFEST = "manifest.json"
"""Name of the file that replaces counts.json in a directory of `prepare.py`."""


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
    files: Mapping[str, int] | None = None
    """Size in bytes of every file by its path in a prepared directory; None for other ones."""

    def open_shards(self, side: Side) -> Shards:
        """Return the tokens of a side.

        Raises `CorruptInputError` with the name of a file that is missing or has another size.
        """
        if self.files is None:
            shards = Shards.in_directory(self.directory, side)
        else:
            sizes = {self.directory / name: size for name, size in self.files.items()}
            paths = [path for path in sizes if path.match(f"{side}_*.bin")]
            for path in paths:
                if not path.is_file() or path.stat().st_size != sizes[path]:
                    raise CorruptInputError(
                        f"{path} is missing or has changed",
                        hint=f"`tiedgpt data verify {self.directory}` says what to do",
                    )
            shards = Shards(sorted(paths))
        n_tokens = getattr(self, side).tokens
        if len(shards) != n_tokens:
            raise CorruptInputError(
                f"{self.directory} holds {len(shards):,} {side} tokens and {n_tokens:,} were "
                "written: shards are missing or changed",
                hint="train in another --out",
            )
        return shards


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
    after each document with the characters done and the characters in all.

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
        require_both_sides(counts)
        write_json(temporary / COUNTS, {side: asdict(counts[side]) for side in SIDES})
    return EncodedCorpus(directory, counts["train"], counts["val"])


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


def require_both_sides(counts: Mapping[Side, Counts]) -> None:
    """Raise `UserError` if a side has no tokens."""
    for side in SIDES:
        if not counts[side].tokens:
            raise UserError(
                f"the {side} side of the split has no tokens", hint="give more text, or --val"
            )


def open_encoded(directory: str | Path) -> EncodedCorpus:
    """Return the value that `encode_corpus` or `prepare_data` returned for the directory.

    Raises:
        UserError: the directory was not made by either.
        CorruptInputError: its counts cannot be read, or its manifest was changed.
    """
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        manifest = read_sealed(directory / MANIFEST)
        sizes = {name: size for name, (size, _) in manifest["files"].items()}
        train, val = (Counts(**manifest[side]) for side in SIDES)
        return EncodedCorpus(directory, train, val, sizes)
    path = directory / COUNTS
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
        return EncodedCorpus(directory, Counts(**counts["train"]), Counts(**counts["val"]))
    except OSError as error:
        raise UserError(f"{directory} holds no encoded text ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptInputError(f"{path} is damaged: encode the text again") from error


def note_split_characters(encoded: EncodedCorpus, tokenizer: Tokenizer) -> list[str]:
    """Return a note if most characters of the training text take several tokens."""
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
