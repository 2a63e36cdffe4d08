"""Byte-level BPE as GPT-2 has it, and `Codec`, the base class of all kinds of vocabulary.

Byte-level BPE encodes text -> UTF-8 bytes -> pieces -> ids. Any text can be encoded, because the
256 bytes are tokens and merging only joins them (Sennrich et al. 2016; on bytes: Radford et al.
2019, "Language Models are Unsupervised Multitask Learners", section 2.2). Files write a byte as a
printable character: `BYTE_ALPHABET`.

`tokenizers` encodes short texts. tiktoken encodes long ones, several times as fast, where
`tiktoken_twin` has proved that its ids are the same.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from typing_extensions import override

from tiedgpt.errors import UserError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
SPECIAL = re.compile(r"<.*>|\[.*\]|madeupword\d+")
"""Special tokens, which no merge makes: <|endoftext|>, <s>, [PAD]; and fairseq's padding."""

Ids = list[int] | NDArray[np.uint32]
"""(N,) ids, as they come from the library that encodes."""


class Codec:
    """Base of all kinds of vocabulary. Special tokens in a text are ordinary text, unless said."""

    decodes_added = False
    """Whether the library's decoder also decodes added tokens; otherwise they are text."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        self._rust = rust

    @staticmethod
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` is of this kind."""
        raise NotImplementedError

    def encode(self, text: str, at: int = 0) -> Ids:
        """`text` -> (N,) ids; `at` is the position of `text` in the input, for errors."""
        raise NotImplementedError

    def encode_by_library(self, text: str) -> list[int]:
        """Return the ids that `tokenizers` gives `text` (N,).

        Raises UserError if the tokenizer's own rules fail on the text: a regular expression that
        explodes is a panic of Rust, no `Exception`.
        """
        return _encode(self._rust, text)

    def encode_special(self, text: str) -> list[int]:
        """Return the ids of `text` (N,), with special tokens in the text found as such."""
        return _encode(self._special_rust, text)

    @cached_property
    def _special_rust(self) -> tokenizers.Tokenizer:
        """A copy that finds special tokens: changing the setting is not safe between threads."""
        rust = tokenizers.Tokenizer.from_str(self._rust.to_str())
        rust.encode_special_tokens = False
        return rust

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes of a token of the vocabulary."""
        return token.encode()

    def first_bytes(self, token: str) -> bytes:
        """Return the bytes of a token of the vocabulary that begins a text."""
        return self.token_bytes(token)

    def word_ends(self) -> set[int]:
        """Return the ids whose last byte is a space that is dropped at the end of a text."""
        return set()


def _encode(rust: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = rust.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"the tokenizer cannot encode a text of {len(text):,} characters: {why}",
            hint="correct the regular expressions and the unk_token of its tokenizer.json, or "
            "divide the text",
        ) from None
    return ids


def _byte_alphabet() -> list[str]:
    """GPT-2's `bytes_to_unicode`: visible Latin-1 characters are themselves, others U+0100 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()
OTHER_SETTINGS = tuple(
    "dropout continuing_subword_prefix end_of_word_suffix ignore_merges byte_fallback "
    "unk_token".split()
)
"""Settings of a model in `tokenizer.json` that are off where only merges decide."""
_TO_LATIN_1 = {ord(character): byte for byte, character in enumerate(BYTE_ALPHABET)}
LONG_TEXT = 4_000
"""Characters from which tiktoken encodes: building its tables takes longer than a short text."""
BULK = 200_000
"""Characters, of all texts together, after which it encodes short ones, too."""
CHUNK = 8_192
"""Characters encoded at a time."""
LONGEST_RUN = 4_096
"""A longer run of characters without a cut is left to `tokenizers`: tiktoken panics on a
million spaces in a row, and up to 0.11 takes quadratic time for one piece."""
CUT = re.compile(r"\S(?=[ \n])|[^\W_](?=[!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")
"""Places where text may be cut: no piece of GPT-2's regex continues from another character to
whitespace, nor from a letter or a digit to punctuation (GPT-1's neither), and it looks ahead only
after whitespace. (Python's \\s covers more characters.)"""
_WORD = re.compile(r"(?<=[^\W_]{3})(?=[^\W_])")
"""Places within a word, after the two letters that a contraction may have."""
_GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""GPT-2's regex in the form of tiktoken, with possessive quantifiers that change no match."""


def greedy_tokens(stored: dict[str, Any]) -> list[str]:
    """Return the added tokens of a `tokenizer.json` that are found by more than their text."""
    flags = ("lstrip", "rstrip", "single_word")
    return [token["content"] for token in stored["added_tokens"] if any(map(token.get, flags))]


def unlike_gpt2(stored: dict[str, Any]) -> list[str]:
    """Return the parts of a byte-level BPE's `tokenizer.json` that differ from GPT-2's."""
    model, cutter = stored["model"], stored["pre_tokenizer"] or {}
    odd = [key for key in OTHER_SETTINGS if model.get(key)]
    is_gpt2s = cutter.get("type") == "ByteLevel" and cutter.get("use_regex") is True
    if not is_gpt2s or cutter.get("add_prefix_space") is not False:
        odd.append("pre_tokenizer")
    return [*odd, "normalizer"] if stored["normalizer"] is not None else odd


def chunks(text: str, cut: re.Pattern[str] = CUT) -> Iterator[str]:
    """Split `text` after CHUNK characters or more, at the end of a word.

    Pieces of GPT-2's regex stay whole. A match of `cut` ends at a place where the text may be cut.
    """
    start = 0
    while start < len(text):
        match = cut.search(text, start + CHUNK)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end


def byte_level_tokenizer(model: models.BPE, *, prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer of a BPE over BYTE_ALPHABET that splits by GPT-2's regex."""
    rust = tokenizers.Tokenizer(model)
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    rust.decoder = decoders.ByteLevel()
    return rust


def add_ends(rust: tokenizers.Tokenizer, bos: str | None = None, eos: str | None = None) -> None:
    """Set the tokens of the vocabulary that stand before and after every text (in place)."""
    tokens = {token: rust.token_to_id(token) for token in (bos, eos) if token is not None}
    rust.post_processor = processors.TemplateProcessing(
        single=[token for token in (bos, "$A", eos) if token], special_tokens=[*tokens.items()]
    )


def begin_token(rust: tokenizers.Tokenizer) -> str | None:
    """Return the token that the tokenizer's post-processor puts before a text, if it does."""
    steps = [] if rust.post_processor is None else [json.loads(rust.post_processor.__getstate__())]
    for step in steps:
        steps += step.get("processors", [])
        for piece in step.get("single", [])[:1]:
            if "SpecialToken" in piece:
                return str(piece["SpecialToken"]["id"])
        if "cls" in step:  # BERT's and RoBERTa's
            return str(step["cls"][0])
    return None


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train a BPE of at most `vocab_size` ids: 256 bytes, merges, and `<|endoftext|>`, the last.

    A pair is merged only if it occurs at least twice, so a small corpus gives fewer ids. Raises
    UserError if `vocab_size` is below 257.
    """
    if vocab_size < 257:
        raise UserError(
            f"vocab_size must be at least 257, for the 256 bytes and {END_OF_TEXT}, got "
            f"{vocab_size}",
            hint="use a character vocabulary for fewer ids",
        )
    rust = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=BYTE_ALPHABET,
        show_progress=False,
    )
    rust.train_from_iterator((chunk for text in texts for chunk in _short(chunks(text))), trainer)
    rust.add_special_tokens([END_OF_TEXT])  # added after training: the last id, as in GPT-2
    return rust


def _short(pieces: Iterable[str]) -> Iterator[str]:
    """Yield training text; cut long runs without whitespace, which take quadratic time."""
    for chunk in pieces:
        step = LONGEST_RUN if len(chunk) > CHUNK + LONGEST_RUN else len(chunk)
        yield from (chunk[at : at + step] for at in range(0, len(chunk), step))


class ByteLevelBPE(Codec):
    """Encodes with a byte-level BPE; special tokens in the text are ordinary text."""

    _n_encoded = 0
    """Characters so far."""

    @staticmethod
    @override
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` is a BPE whose tokens are bytes in BYTE_ALPHABET and nothing else."""
        return (
            isinstance(rust.model, models.BPE)
            and isinstance(rust.decoder, decoders.ByteLevel)
            and not rust.model.continuing_subword_prefix
            and not rust.model.end_of_word_suffix
        )

    @override
    def token_bytes(self, token: str) -> bytes:
        try:
            return token.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # not written by a byte-level trainer: it stands for its text
            return token.encode()

    @cached_property
    def _twin(self) -> "tiktoken.Encoding | None":
        return tiktoken_twin(self._rust)

    @cached_property
    def _lost_bytes(self) -> set[int]:
        """Bytes without a token, which `tokenizers` would drop silently."""
        unknown = self._rust.model.unk_token
        if unknown is not None and self._rust.token_to_id(unknown) is not None:
            return set()
        ids = map(self._rust.token_to_id, BYTE_ALPHABET)
        return {byte for byte, id in enumerate(ids) if id is None}

    @override
    def encode(self, text: str, at: int = 0) -> Ids:
        """`text` -> (N,) ids.

        Raises UserError for a character with a byte outside the vocabulary. Only foreign
        vocabularies lack some of the 256.
        """
        self._n_encoded += len(text)
        is_little = not text or (len(text) <= LONG_TEXT and self._n_encoded <= BULK)
        if is_little or not self._is_cut_as_gpt2s:
            return self._encode_by_tokenizers(text, at)
        parts = []
        for chunk in chunks(text):
            if self._twin is not None and len(chunk) <= CHUNK + LONGEST_RUN:
                parts.append(self._twin.encode_to_numpy(chunk, disallowed_special=()))
                at += len(chunk)
                continue
            for run in self._runs(chunk):
                parts.append(np.array(self._encode_by_tokenizers(run, at), np.uint32))
                at += len(run)
        return np.concatenate(parts)

    def _runs(self, text: str) -> Iterator[str]:
        """Split long words between bytes that no token joins.

        The memory of `tokenizers` is about 250 bytes for each byte of its text.
        """
        start = 0
        while len(text) - start > CHUNK + LONGEST_RUN:
            at = start + CHUNK
            places = (match.start() for match in _WORD.finditer(text, at, at + LONGEST_RUN))
            ends = (end for end in places if not self._is_joined(text, end))
            end = next(ends, len(text))
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _is_joined(self, text: str, at: int) -> bool:
        """Whether a token has the byte before this position next to the byte after it."""
        return text[at - 1].encode()[-1:] + text[at].encode()[:1] in self._byte_pairs

    @cached_property
    def _byte_pairs(self) -> set[bytes]:
        """All pairs of adjacent bytes in tokens."""
        tokens = map(self.token_bytes, self._rust.get_vocab(with_added_tokens=False))
        return {token[at : at + 2] for token in tokens for at in range(len(token) - 1)}

    @cached_property
    def _is_cut_as_gpt2s(self) -> bool:
        """Whether the text is divided by GPT-2's regex alone, so that parts can be encoded."""
        cutter = self._rust.pre_tokenizer
        return (
            isinstance(cutter, pre_tokenizers.ByteLevel)
            and (cutter.use_regex, cutter.add_prefix_space) == (True, False)
            and self._rust.normalizer is None
            and all(token.special for token in self._rust.get_added_tokens_decoder().values())
        )

    def _encode_by_tokenizers(self, text: str, at: int) -> list[int]:
        self._check_bytes(text, at)
        return self.encode_by_library(text)

    @override
    def encode_special(self, text: str) -> list[int]:
        self._check_bytes(text)
        return super().encode_special(text)

    def _check_bytes(self, text: str, at: int = 0) -> None:
        for position, character in enumerate(text if self._lost_bytes else "", at):
            if not self._lost_bytes.isdisjoint(character.encode()):
                raise UserError(
                    f"character {character!r} at position {position} has a byte for which "
                    "this vocabulary has no token",
                    hint="use a vocabulary with all 256 bytes",
                )


def tiktoken_twin(rust: tokenizers.Tokenizer) -> "tiktoken.Encoding | None":
    """Return the tiktoken encoding with the ids of `rust` on every text, or None if unproven.

    tiktoken merges the adjacent pair whose *concatenation* has the lowest id; `tokenizers` merges
    the adjacent pair whose *merge* comes first in a list. The ids are the same if

    1. the text is cut into the same pieces: by ByteLevel with GPT-2's regex, without a prefix
       space, a normalizer, or an added token that is found in ordinary text; and every byte has a
       token;
    2. only merges decide: no dropout, no look-up of whole pieces (ignore_merges), no affixes;
    3. the tokens that merges make have ids that strictly increase in the order of the merges, so
       that "lowest id" is "first merge", and no two merges make the same token;
    4. every byte and every token that a merge makes, alone as a piece, is encoded as itself.

    Why 4 is enough. Let X and Y be adjacent, in a state that `tokenizers` reaches, and let XY = T
    be a token. No merge has crossed the ends of T, and both choose by (rank, leftmost), so what
    happened inside T is what happens when T is encoded alone, whose state is now [X, Y] too. That
    ends as [T], and from [X, Y] only the merge (X, Y) leads there: it is in the list. So both see
    the same pairs, in the same order, at every step. (tiktoken's look-up of a whole piece gives [T]
    as well.)

    Takes about 0.2 s for GPT-2's 50,257 tokens.
    """
    import tiktoken  # not for short texts

    stored = json.loads(rust.to_str())
    if unlike_gpt2(stored) or not all(token["special"] for token in stored["added_tokens"]):
        return None
    vocabulary: dict[str, int] = stored["model"]["vocab"]
    merged = [a + b for a, b in stored["model"]["merges"]]
    in_order = all(vocabulary[a] < vocabulary[b] for a, b in itertools.pairwise(merged))
    if not in_order or not set("".join(merged)) <= set(BYTE_ALPHABET) <= vocabulary.keys():
        return None
    ids = {token: vocabulary[token] for token in [*BYTE_ALPHABET, *merged]}
    if any([piece.id for piece in rust.model.tokenize(token)] != [ids[token]] for token in ids):
        return None
    to_bytes = ByteLevelBPE(rust).token_bytes
    ranks = {to_bytes(token): id for token, id in ids.items()}
    return tiktoken.Encoding(
        "tiedgpt", pat_str=_GPT2_PIECES, mergeable_ranks=ranks, special_tokens={}
    )
