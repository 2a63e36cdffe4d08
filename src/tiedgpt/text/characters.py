"""One id per character: the characters of a text, sorted, then `<|endoftext|>`.

A vocabulary from elsewhere (nanoGPT's) may have other ids and no end of text. It is kept as a
Hugging Face tokenizer (WordLevel over single characters, fused without spaces), so that
transformers loads its `tokenizer.json` with the same ids. Encoding is one numpy look-up.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers
from typing_extensions import override

from tiedgpt.errors import UserError
from tiedgpt.text.bpe import END_OF_TEXT, Codec


def character_tokenizer(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer of the characters in `texts`; `UserError` without any character."""
    characters = sorted(set().union(*texts))
    if not characters:
        raise UserError("a character vocabulary needs text with at least one character")
    rust = tokenizer_of_ids({character: id for id, character in enumerate(characters)})
    rust.add_special_tokens([END_OF_TEXT])
    return rust


def tokenizer_of_ids(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer with these ids of single characters and no other token."""
    # No character is called "<unk>": transformers, too, refuses unknown characters.
    rust = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    every_character = tokenizers.Regex(r"[\s\S]")  # `.` leaves newlines out
    rust.pre_tokenizer = pre_tokenizers.Split(every_character, behavior="isolated")
    rust.decoder = decoders.Fuse()
    return rust


class Characters(Codec):
    """Encodes with a vocabulary of single characters; refuses all other characters."""

    @staticmethod
    @override
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` has the form that `tokenizer_of_ids` returns."""
        return (
            isinstance(rust.model, models.WordLevel)
            and _steps(rust) == _steps(tokenizer_of_ids({}))
            and all(len(token) == 1 for token in rust.get_vocab(with_added_tokens=False))
            and all(token.special for token in rust.get_added_tokens_decoder().values())
        )

    @cached_property
    def _id_of_code_point(self) -> NDArray[np.int64]:
        """(largest code point + 2,): the id or -1; the last entry stands for all beyond it."""
        vocabulary = self._rust.get_vocab(with_added_tokens=False)
        ids = np.full(max(map(ord, vocabulary), default=0) + 2, -1, dtype=np.int64)
        for character, id in vocabulary.items():
            ids[ord(character)] = id
        return ids

    @override
    def encode(self, text: str, at: int = 0) -> NDArray[np.uint32]:
        """`text` of N characters -> (N,) ids; `UserError` for a character without an id."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        id_table = self._id_of_code_point
        ids = id_table[np.minimum(points, len(id_table) - 1)]
        if ids.size and ids.min() < 0:
            first = int(np.argmin(ids))
            raise UserError(
                f"character {text[first]!r} (U+{ord(text[first]):04X}) at position {at + first} "
                "is not in this character vocabulary",
                hint=(
                    "make the vocabulary from text that has it, or use a byte-level BPE, which "
                    "takes any text"
                ),
            )
        return ids.astype(np.uint32)

    @override
    def encode_special(self, text: str) -> list[int]:
        ids: list[int] = []
        splitter, special_ids = self._special_splitter
        parts = splitter.encode(text)
        for number, (start, end) in zip(parts.ids, parts.offsets, strict=True):
            if number in special_ids:
                ids.append(special_ids[number])
            else:
                ids += self.encode(text[start:end], start).tolist()
        return ids

    @cached_property
    def _special_splitter(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Return a tokenizer that splits at special tokens, and a map from its ids to ours."""
        splitter = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        added = self._rust.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        splitter.add_special_tokens([added[id] for id in special.values()])
        numbers = splitter.get_vocab()
        return splitter, {numbers[token]: id for token, id in special.items()}


def _steps(rust: tokenizers.Tokenizer) -> list[Any]:
    stored = json.loads(rust.to_str())
    return [stored[step] for step in ("normalizer", "pre_tokenizer", "decoder")]
