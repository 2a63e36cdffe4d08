"""One id a character: the vocabulary is the characters of a text, sorted, then `<|endoftext|>`.

A vocabulary from elsewhere (nanoGPT's) may give other ids to its characters and end no text.

Kept as a Hugging Face tokenizer (WordLevel over single characters, fused without spaces), so that
a `tokenizer.json` of it loads in transformers with the same ids. Encoding is one numpy look-up.
"""

import json
from collections.abc import Iterable
from functools import cached_property

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from tiedgpt.errors import UserError

END_OF_TEXT = "<|endoftext|>"

_EACH_CHARACTER = r"[\s\S]"  # `.` would leave newlines out


def character_tokenizer(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """The character vocabulary of `texts`, as a Hugging Face tokenizer.

    Raises UserError if there is not one character in `texts`.
    """
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise UserError(
            "a character vocabulary needs text, and there is none; give at least one character"
        )
    rust = tokenizer_of_ids({character: id for id, character in enumerate(sorted(characters))})
    rust.add_special_tokens([END_OF_TEXT])
    return rust


def tokenizer_of_ids(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """The tokenizer with these ids of single characters, and no token more."""
    # No character is called "<unk>", so that transformers, too, refuses unknown ones.
    rust = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    rust.pre_tokenizer = _split_characters()
    rust.decoder = decoders.Fuse()
    return rust


def _split_characters() -> pre_tokenizers.Split:
    return pre_tokenizers.Split(tokenizers.Regex(_EACH_CHARACTER), behavior="isolated")


class Characters:
    """Encodes with a vocabulary of single characters; every other character is refused."""

    kind = "char"

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        self._rust = rust

    @staticmethod
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` is such a tokenizer as `character_tokenizer` makes."""
        return (
            isinstance(rust.model, models.WordLevel)
            and isinstance(rust.decoder, decoders.Fuse)
            and isinstance(rust.pre_tokenizer, pre_tokenizers.Split)
            and _state(rust.pre_tokenizer) == _state(_split_characters())
            and rust.normalizer is None
            and all(len(token) == 1 for token in rust.get_vocab(with_added_tokens=False))
        )

    def token_bytes(self, token: str) -> bytes:
        """The UTF-8 bytes that a token of the vocabulary stands for."""
        return token.encode()

    def last_bytes(self) -> dict[int, bytes]:
        """None: a token is the same bytes wherever it stands."""
        return {}

    @cached_property
    def _id_of_code_point(self) -> NDArray[np.int64]:
        """(largest code point + 2,): the id, or -1; the last entry stands for all beyond it."""
        vocabulary = self._rust.get_vocab(with_added_tokens=False)
        ids = np.full(max(map(ord, vocabulary), default=0) + 2, -1, dtype=np.int64)
        for character, id in vocabulary.items():
            ids[ord(character)] = id
        return ids

    def encode_array(self, text: str, at: int = 0) -> NDArray[np.uint32]:
        """`text` of N characters -> (N,) ids.

        Raises UserError for a character outside the vocabulary; its position is counted from `at`.
        """
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        known = self._id_of_code_point
        ids = known[np.minimum(points, len(known) - 1)]
        if ids.size and ids.min() < 0:
            first = int(np.argmin(ids))
            raise UserError(
                f"character {text[first]!r} (U+{ord(text[first]):04X}) at position {at + first} is "
                f"not in this character vocabulary; make the vocabulary from text that has it, or "
                f"use a byte-level BPE, which takes any text"
            )
        found: NDArray[np.uint32] = ids.astype(np.uint32)
        return found

    def encode(self, text: str, at: int = 0) -> list[int]:
        """`text` -> ids; as `encode_array`."""
        ids: list[int] = self.encode_array(text, at).tolist()
        return ids


def _state(part: pre_tokenizers.PreTokenizer) -> object:
    state: object = json.loads(part.__getstate__())
    return state
