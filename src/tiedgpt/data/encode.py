"""From a split of documents to a directory of token shards, complete or not there at all.

Documents and a tokenizer come in; `train_000000.bin`, `val_000000.bin`, ... and `counts.json` go
out, in a directory that appears by one rename when everything in it is on the disk.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data.shards import TOKENS_PER_SHARD, ShardWriter
from tiedgpt.data.split import Side, Split
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import replacing, write_json

COUNTS = "counts.json"


class Encoder(Protocol):
    """What is asked of a tokenizer here; `tiedgpt.text.Tokenizer` has it."""

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a document, if there is one."""

    def encode_array(self, text: str) -> NDArray[Any]:
        """Return a text's ids, (n,), of an unsigned dtype."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Counts:
    """What one side of the split holds; `tokens` includes the ends of text."""

    documents: int = 0
    characters: int = 0
    utf8_bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class EncodedCorpus:
    """A directory of shards and what is in them."""

    directory: Path
    train: Counts
    val: Counts


def encode_corpus(
    split: Split,
    tokenizer: Encoder,
    directory: str | Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedCorpus:
    """Encode both sides of a split into the shards of a new directory.

    Every document is followed by the tokenizer's end of text, where it has one. `progress` is
    called after each document with the characters done and the characters in all.

    Raises:
        UserError: the directory exists and is not empty, a side has no tokens, or the vocabulary
            does not fit 16 bits.
        NoRoomError: the disk is full; nothing is left of the attempt.
        CorruptInputError: a document cannot be read (see `documents`).
    """
    directory = Path(directory)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} exists already: remove it or name another directory")
    with replacing(directory) as partial:
        partial.mkdir()
        counts = _encode(split, tokenizer, partial, tokens_per_shard, progress)
        write_json(partial / COUNTS, {side: asdict(counts[side]) for side in counts})
    return EncodedCorpus(directory, **counts)


def open_encoded(directory: str | Path) -> EncodedCorpus:
    """Return what `encode_corpus` returned when it made the directory.

    Raises:
        UserError: it is no such directory.
        CorruptInputError: its counts cannot be read.
    """
    path = Path(directory) / COUNTS
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
        return EncodedCorpus(Path(directory), Counts(**counts["train"]), Counts(**counts["val"]))
    except OSError as error:
        raise UserError(f"{directory} holds no encoded text ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptInputError(f"{path} is damaged: encode the text again") from error


def _encode(
    split: Split,
    tokenizer: Encoder,
    directory: Path,
    tokens_per_shard: int,
    progress: Callable[[int, int], None] | None,
) -> dict[Side, Counts]:
    """Write the shards of both sides, holding one document at a time."""
    sides: tuple[Side, ...] = get_args(Side)
    counts = dict.fromkeys(sides, Counts())
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    done = 0
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(
                ShardWriter(
                    directory, side, vocab_size=len(tokenizer), tokens_per_shard=tokens_per_shard
                )
            )
            for side in sides
        }
        for side, document in split:
            ids = tokenizer.encode_array(document.text)
            writers[side].write(ids)
            writers[side].write(np.array(end, dtype=np.uint16))
            so_far = counts[side]
            counts[side] = Counts(
                documents=so_far.documents + 1,
                characters=so_far.characters + len(document.text),
                utf8_bytes=so_far.utf8_bytes + len(document.text.encode()),
                tokens=writers[side].n_tokens,
            )
            done += len(document.text)
            if progress is not None:
                progress(done, split.characters)
    for side in sides:
        if not counts[side].tokens:
            raise UserError(f"the {side} side of the split has no tokens: give more text")
    return counts
