"""WordPiece of BERT, and BPE and unigram of SentencePiece: text -> words -> pieces of words -> ids.

A token says whether it begins a word: `▁` (U+2581) marks a word's first token in SentencePiece,
`##` marks the others in WordPiece. The first word of a text has no space before it.
`tokenizers` encodes and decodes, so ids and text are those of transformers.
"""

from __future__ import annotations

import json
import re
from functools import cached_property

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from typing_extensions import override

from tiedgpt.text.bpe import CUT, Codec, Ids, chunks

ANCHOR = "a"
"""A token that stands before another one: it decodes to itself."""
_CHINESE_CUT = re.compile(rf"{CUT.pattern}|[\u4e00-\u9fff]")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece's tokens of single bytes."""
_SENTENCEPIECE_STEPS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


class Pieces(Codec):
    """Base class of `WordPieces` and `SentencePieces`, which decode by `tokenizers`."""

    decodes_added = True

    @override
    def encode(self, text: str, at: int = 0) -> Ids:
        return self.encode_by_library(text)

    @override
    def token_bytes(self, token: str) -> bytes:
        return self._rust.decoder.decode([ANCHOR, token])[len(ANCHOR) :].encode()

    @override
    def first_bytes(self, token: str) -> bytes:
        return self._rust.decoder.decode([token]).encode()


class WordPieces(Pieces):
    """Encodes with BERT's WordPiece, which most Chinese GPT-2s have; other characters are [UNK]."""

    @staticmethod
    @override
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` is a WordPiece that loses no unknown character silently."""
        return (
            isinstance(rust.model, models.WordPiece)
            and isinstance(rust.decoder, decoders.WordPiece)
            and rust.decoder.prefix == rust.model.continuing_subword_prefix
            and rust.token_to_id(rust.model.unk_token) is not None
        )

    @override
    def encode(self, text: str, at: int = 0) -> Ids:
        if self._cut is None:
            return self.encode_by_library(text)
        return [id for chunk in chunks(text, self._cut) for id in self.encode_by_library(chunk)]

    @cached_property
    def _cut(self) -> re.Pattern[str] | None:
        """Places where a long text may be cut; None for rules other than BERT's."""
        normalizer = self._rust.normalizer
        added = self._rust.get_added_tokens_decoder().values()
        if (
            not isinstance(normalizer, normalizers.BertNormalizer)
            or not isinstance(self._rust.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            or not all(token.special for token in added)
        ):
            return None
        return _CHINESE_CUT if normalizer.handle_chinese_chars else CUT


class SentencePieces(Pieces):
    """Encodes with SentencePiece's BPE or unigram in a `tokenizer.json`."""

    @staticmethod
    @override
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` has such a model and decoder, and loses no unknown character silently."""
        model = rust.model
        if rust.decoder is None or not _decoder_steps(rust) <= _SENTENCEPIECE_STEPS:
            return False
        if isinstance(model, models.Unigram):
            stored = json.loads(rust.to_str())["model"]
            return stored.get("unk_id") is not None or stored.get("byte_fallback") is True
        return (
            isinstance(model, models.BPE)
            and not model.continuing_subword_prefix
            and not model.end_of_word_suffix
            and (model.byte_fallback or rust.token_to_id(model.unk_token or "") is not None)
        )

    @override
    def token_bytes(self, token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if self._has_bytes else None
        return bytes.fromhex(byte[1]) if byte else super().token_bytes(token)

    @override
    def first_bytes(self, token: str) -> bytes:
        is_byte = self._has_bytes and _BYTE.fullmatch(token)
        return self.token_bytes(token) if is_byte else super().first_bytes(token)

    @cached_property
    def _has_bytes(self) -> bool:
        return "ByteFallback" in _decoder_steps(self._rust)


def _decoder_steps(rust: tokenizers.Tokenizer) -> set[str]:
    """Return the types of the steps of a decoder."""
    decoder = json.loads(rust.decoder.__getstate__())
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def bert_tokenizer(
    model: models.WordPiece,
    *,
    lowercase: bool = True,
    chinese: bool = True,
    strip_accents: bool | None = None,
) -> tokenizers.Tokenizer:
    """Return a tokenizer of a WordPiece that normalizes and divides text as BERT's.

    With `strip_accents` None, accents are removed if the text becomes lower case.
    """
    rust = tokenizers.Tokenizer(model)
    rust.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(prefix="##")
    return rust
