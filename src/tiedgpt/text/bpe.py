"""Byte-level BPE as GPT-2 has it: text -> UTF-8 bytes -> pieces -> ids; and training one.

Any text can be encoded, because the 256 bytes are tokens, and merging only joins them (Sennrich et
al. 2016; on bytes: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners",
section 2.2). Files write a byte as a printable character: `BYTE_ALPHABET`.

Short texts are encoded by `tokenizers`, long ones by tiktoken, several times as fast, where
`twin.py` has proved that its ids are the same.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from tiedgpt.errors import UserError
from tiedgpt.text.characters import END_OF_TEXT

if TYPE_CHECKING:
    import tiktoken


def _byte_alphabet() -> list[str]:
    """GPT-2's `bytes_to_unicode`: visible Latin-1 characters are themselves, others U+0100 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()
_TO_LATIN_1 = {ord(character): byte for byte, character in enumerate(BYTE_ALPHABET)}

LONG_TEXT = 4_000  # characters; below, building tiktoken's tables would cost more than it saves
CHUNK = 8_192  # characters encoded at a time
# tiktoken panics on a million blanks in a row, and up to 0.11 takes quadratic time for one piece:
# what cannot be cut for this many characters is left to `tokenizers`.
LONGEST_RUN = 4_096

# A piece of GPT-2's regex never goes on from a character that is not blank to one that is, and
# looks ahead only after blanks: text may be cut there. (Python's \s covers more than the regex's.)
_CUT = re.compile(r"\S(?=[ \n])")


def chunks(text: str) -> Iterator[str]:
    """`text`, cut where a piece of GPT-2's regex ends anyway, once past CHUNK."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + CHUNK)
        end = cut.end() if cut else len(text)
        yield text[start:end]
        start = end


def byte_level_tokenizer(model: models.BPE, *, prefix_space: bool = False) -> tokenizers.Tokenizer:
    """`model`, a BPE over BYTE_ALPHABET, with GPT-2's regex before it and bytes after it."""
    rust = tokenizers.Tokenizer(model)
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    rust.decoder = decoders.ByteLevel()
    return rust


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A BPE of at most `vocab_size` ids: 256 bytes, merges by frequency, `<|endoftext|>` last.

    A pair is merged only if it occurs at least twice, so a small corpus gives fewer ids.
    Raises UserError if `vocab_size` is below 257.
    """
    if vocab_size < 257:
        raise UserError(
            f"vocab_size is {vocab_size}, but a byte-level BPE has 256 bytes and {END_OF_TEXT}; "
            f"give at least 257, or use a character vocabulary"
        )
    rust = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=BYTE_ALPHABET,
        show_progress=False,
    )
    rust.train_from_iterator((chunk for text in texts for chunk in chunks(text)), trainer)
    rust.add_special_tokens([END_OF_TEXT])  # added after training: the last id, as in GPT-2
    return rust


class ByteLevelBPE:
    """Encodes with a byte-level BPE; special tokens in the text are ordinary text here."""

    kind = "bpe"

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        self._rust = rust

    @staticmethod
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` is a BPE whose tokens are bytes in BYTE_ALPHABET and nothing else."""
        return (
            isinstance(rust.model, models.BPE)
            and isinstance(rust.decoder, decoders.ByteLevel)
            and not rust.model.continuing_subword_prefix
            and not rust.model.end_of_word_suffix
        )

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        try:
            return token.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # written by no byte-level trainer; taken as the text it is
            return token.encode()

    def last_bytes(self) -> dict[int, bytes]:
        """None: a token is the same bytes wherever it stands."""
        return {}

    @cached_property
    def _twin(self) -> "tiktoken.Encoding | None":
        from tiedgpt.text.twin import tiktoken_twin

        return tiktoken_twin(self._rust)

    @cached_property
    def _lost_bytes(self) -> list[int]:
        """Bytes that have no token, and that `tokenizers` would therefore drop without a word."""
        unknown = self._rust.model.unk_token
        if unknown is not None and self._rust.token_to_id(unknown) is not None:
            return []
        ids = map(self._rust.token_to_id, BYTE_ALPHABET)
        return [byte for byte, id in enumerate(ids) if id is None]

    def encode_array(self, text: str, at: int = 0) -> NDArray[np.uint32]:
        """`text` -> (N,) ids.

        Raises UserError for a character with a byte outside the vocabulary, with its position
        counted from `at`; that happens only where a foreign vocabulary lacks some of the 256.
        """
        if len(text) <= LONG_TEXT or self._twin is None:
            return np.array(self._encode_by_tokenizers(text, at), dtype=np.uint32)
        twin = self._twin
        parts = [
            twin.encode_to_numpy(chunk, disallowed_special=())
            if len(chunk) <= CHUNK + LONGEST_RUN
            else np.array(self._encode_by_tokenizers(chunk, at), dtype=np.uint32)
            for chunk in chunks(text)
        ]
        return np.concatenate(parts)

    def encode(self, text: str, at: int = 0) -> list[int]:
        """`text` -> ids; as `encode_array`."""
        if len(text) <= LONG_TEXT:
            return self._encode_by_tokenizers(text, at)
        ids: list[int] = self.encode_array(text, at).tolist()
        return ids

    def _encode_by_tokenizers(self, text: str, at: int) -> list[int]:
        if self._lost_bytes:
            self._refuse_lost_bytes(text, at)
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def _refuse_lost_bytes(self, text: str, at: int) -> None:
        lost = set(self._lost_bytes)
        for position, character in enumerate(text, at):
            if not lost.isdisjoint(character.encode()):
                raise UserError(
                    f"character {character!r} at position {position} has a byte for which this "
                    f"vocabulary has no token; use a vocabulary with all 256 bytes"
                )
