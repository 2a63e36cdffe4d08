"""`Tokenizer`: text -> ids -> text, for every kind of vocabulary.

A `Codec` knows one kind: byte-level BPE (`bpe.py`), GPT-1's lower-case BPE (`gpt1.py`), WordPiece
and SentencePiece (`pieces.py`) or single characters (`characters.py`). Decoding is the same for
all, and is here.
"""

from __future__ import annotations

import codecs
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import replacing, write_json
from tiedgpt.names import ExplainsNames
from tiedgpt.signatures import checked, is_index, wrong_type
from tiedgpt.text.bpe import END_OF_TEXT, ByteLevelBPE, Codec, begin_token, train_bpe
from tiedgpt.text.characters import Characters, character_tokenizer
from tiedgpt.text.directory import CONFIG, TOKEN_NAMES, TOKENIZER_JSON, token_of
from tiedgpt.text.gpt1 import LowerCaseBPE
from tiedgpt.text.pieces import SentencePieces, WordPieces

CODECS: dict[str, type[Codec]] = {
    "bpe": ByteLevelBPE,
    "gpt1": LowerCaseBPE,
    "char": Characters,
    "wordpiece": WordPieces,
    "sentencepiece": SentencePieces,
}
"""Kinds of vocabulary, in the order in which they are tried."""
KEPT_SETTINGS = ("chat_template", "model_max_length", "padding_side")
"""Settings without effect on ids that a loaded tokenizer writes again when it is saved."""


class Tokenizer(ExplainsNames):
    """A tokenizer: text to ids and back.

    `kind` is "bpe" (tokens are bytes), "gpt1" (parts of lower-case words), "char" (single
    characters), "wordpiece" (BERT's) or "sentencepiece" (its BPE or unigram). `bos_token_id` and
    `eos_token_id` are the ids of the tokens that begin and end a text, or None. `len(tokenizer)` is
    V, the number of rows that a model's embedding needs.
    """

    @checked
    def __init__(
        self, rust: tokenizers.Tokenizer, settings: dict[str, Any] | None = None, where: str = ""
    ) -> None:
        rust.no_truncation()  # a file may ask for these, and ids would be lost or made up
        rust.no_padding()
        rust.encode_special_tokens = True  # means: as ordinary text
        self._rust = rust
        self._settings = settings or {}
        self.kind = next((name for name, codec in CODECS.items() if codec.reads(rust)), "")
        if not self.kind:
            raise UserError(
                f"{where}: a tokenizer with the model {type(rust.model).__name__} is not supported",
                hint=(
                    "use GPT-2's byte-level BPE, GPT-1's BPE, WordPiece or SentencePiece with a "
                    "token for unknown characters, or single characters"
                ),
            )
        self._codec = CODECS[self.kind](rust)
        self._size = _checked_size(rust, where)
        self._token_bytes = cache(self._find_bytes)  # few are asked for: not a table of all
        self.bos_token_id = _special_id(rust, self._settings, "bos_token", where)
        self.eos_token_id = _special_id(rust, self._settings, "eos_token", where)

    @classmethod
    @checked
    def from_pretrained(cls, source: str | Path) -> Tokenizer:
        """Read the tokenizer that comes with a checkpoint: from a directory, a file or the hub.

        Reads `tokenizer.json`; `vocab.json` with `merges.txt`; `encoder.json` with `vocab.bpe`
        and GPT-1's two, as OpenAI names them; `vocab.txt` of WordPiece; nanoGPT's `meta.pkl`; the
        one inside a GGUF file. Ids are those of transformers' `AutoTokenizer`. A file of weights
        stands for its directory. A path that exists wins over a hub name. Raises
        UserError if there is no tokenizer or it is of another kind, CorruptInputError if a file is
        damaged.
        """
        from tiedgpt.weights.source import open_tokenizer

        return open_tokenizer(source)

    @classmethod
    @checked
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train a byte-level BPE of at most `vocab_size` ids, the last `<|endoftext|>`.

        There are fewer ids if no pair of tokens is left that occurs twice. Raises UserError if
        `vocab_size` is below 257 or a text is not valid Unicode.
        """
        return cls(train_bpe(_checked_texts(texts), vocab_size))

    @classmethod
    @checked
    def characters(cls, texts: Iterable[str]) -> Tokenizer:
        """One id for each distinct character of `texts`, sorted; then `<|endoftext|>`.

        Raises UserError if `texts` has no character or is not valid Unicode.
        """
        return cls(character_tokenizer(_checked_texts(texts)))

    @checked
    def with_special_tokens(self, tokens: Iterable[str]) -> Tokenizer:
        """Return this tokenizer with more special tokens, after its last id; itself if it has them.

        The model needs a row for each new id (`tie.add_tokens`).
        """
        new = [token for token in dict.fromkeys(tokens) if token not in self._special_ids]
        if not new:
            return self
        rust = tokenizers.Tokenizer.from_str(self.to_json())
        rust.add_special_tokens(new)
        return Tokenizer(rust, self._settings)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens, such as "<|endoftext|>", which `encode` takes for ordinary text."""
        return tuple(self._special_ids)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the `special_tokens`."""
        return frozenset(self._special_ids.values())

    @property
    def vocab_size(self) -> int:
        """V, as `len(tokenizer)`."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Tokenizer(kind={self.kind!r}, len={len(self)}, eos_token_id={self.eos_token_id})"

    def __reduce__(self) -> tuple[Any, ...]:  # for worker processes
        return Tokenizer, (self._rust, self._settings)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise the `TypeError` of an object that is not callable, with the method to use."""
        raise TypeError("'Tokenizer' object is not callable: use tokenizer.encode(text)")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """`text` -> ids, without a token before or after it (see `encode_document`).

        Unless `allow_special`, "<|endoftext|>" in the text is ordinary text. GPT-1's vocabulary has
        `<unk>` for characters that it lacks. Raises UserError if the text is not valid Unicode or
        has a character outside a character vocabulary.
        """
        _refuse_surrogates(text)
        if allow_special and self._may_have_special(text):
            return self._codec.encode_special(text)
        ids = self._codec.encode(text)
        return ids if isinstance(ids, list) else ids.tolist()

    def encode_document(self, text: str, *, allow_special: bool = False) -> list[int]:
        """`text` -> ids, after `begin_ids` unless the text itself begins with them.

        Models read prompts, training texts and scored texts so; the options are those of `encode`.
        """
        ids, begin = self.encode(text, allow_special=allow_special), self.begin_ids
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def _may_have_special(self, text: str) -> bool:
        """Whether a special token is in the text, possibly only once the text is normalized."""
        special = (token for token in self._added.values() if token.special)
        return any(token.normalized or token.content in text for token in special)

    @checked
    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """Return the ids of each text, as `encode`."""
        return [self.encode(text, allow_special=allow_special) for text in _checked_texts(texts)]

    def encode_array(self, text: str) -> NDArray[np.uint16] | NDArray[np.uint32]:
        """`text` -> (N,) ids, for bulk data: uint16 if V is at most 65,536, else uint32.

        Special tokens in the text are ordinary text. Raises as `encode`.
        """
        _refuse_surrogates(text)
        ids = np.asarray(self._codec.encode(text), np.uint32)
        return ids.astype(np.uint16) if len(self) <= 1 << 16 else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids (N,), a list, numpy array or torch tensor.

        Bytes that are not UTF-8 become U+FFFD; special tokens are shown. After GPT-1's last word
        there is no space. Raises UserError for values that are not ids of the vocabulary.
        """
        listed: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        try:
            integers = list(map(operator.index, listed))
        except TypeError as error:
            raise UserError(f"ids must be integers in one dimension: {error}") from error
        pieces = [self.token_bytes(id) for id in integers]
        text = b"".join([*map(self._first_bytes, integers[:1]), *pieces[1:]])
        if integers and integers[-1] in self._word_ends:
            text = text[:-1]
        return text.decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one id, possibly part of a character.

        The last token of a word in GPT-1's vocabulary includes the space that follows; the first
        token of a word in WordPiece and SentencePiece includes the space before it. Raises
        UserError for an id outside the vocabulary.
        """
        if type(id) is not int and not is_index(id):
            raise wrong_type("token_bytes()", "id", "int", id)
        token = self._token_bytes(id) if 0 <= id < self._size else None
        if token is None:
            raise UserError(
                f"id {id} is outside the vocabulary of {self._size} tokens",
                hint=f"use ids of this tokenizer, from 0 to {self._size - 1}",
            )
        return token

    def byte_lengths(self) -> NDArray[np.int64]:
        """(V,): how many bytes of text each id stands for; 0 for special tokens.

        Their sum is a text's length in bytes. With GPT-1's vocabulary and WordPiece that is the
        decoded text, with the spaces between tokens, and without unknown words.
        """
        tokens = map(self._token_bytes, range(self._size))
        lengths = np.array([len(token or b"") for token in tokens], dtype=np.int64)
        lengths[list(self._special_ids.values())] = 0
        return lengths

    def stream(self, after: int | None = None) -> StreamDecoder:
        """Return a decoder for ids that come one by one; its joined pieces equal `decode`.

        If the ids continue a prompt, `after` is its last id: if that ended a word of GPT-1's, the
        first piece begins with a space.
        """
        return StreamDecoder(self.token_bytes, self._first_bytes, self._word_ends, after)

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`, for writers of other formats."""
        return self._rust.to_str()

    @checked
    def save_pretrained(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers loads, too.

        Each file is replaced atomically.
        """
        with replacing(Path(directory) / TOKENIZER_JSON) as temporary:
            temporary.write_text(self._rust.to_str(pretty=True), encoding="utf-8")
        write_json(Path(directory) / CONFIG, self.config())

    def config(self) -> dict[str, Any]:
        """Return the content of `tokenizer_config.json`."""
        config = {key: self._settings[key] for key in KEPT_SETTINGS if key in self._settings}
        tokens = {key: token_of(self._settings, key) for key in TOKEN_NAMES}
        config |= {key: token for key, token in tokens.items() if self._has_token(token)}
        if getattr(self._rust.pre_tokenizer, "add_prefix_space", False):
            config["add_prefix_space"] = True  # transformers before 5 sets what this says
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["clean_up_tokenization_spaces"] = False
        if END_OF_TEXT in self._special_ids:  # a name would make an ordinary token special
            config = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT) | config
        if self.kind == "bpe" and "eos_token" in config:  # as GPT-2's own; CTranslate2 needs one
            config["unk_token"] = config.get("unk_token") or config["eos_token"]
        return config

    def _has_token(self, token: str | None) -> bool:
        return token is not None and self._rust.token_to_id(token) is not None

    def _find_bytes(self, id: int, *, is_first: bool = False) -> bytes | None:
        """Return the bytes of an id, where a text begins if `is_first`; None for an unused id."""
        token = self._rust.id_to_token(id)
        if token is None:
            return None
        if id in self._added and not self._codec.decodes_added:
            return token.encode()
        return self._codec.first_bytes(token) if is_first else self._codec.token_bytes(token)

    def _first_bytes(self, id: int) -> bytes:
        return self._find_bytes(id, is_first=True) or b""

    @cached_property
    def begin_ids(self) -> list[int]:
        """Ids that texts begin with by the tokenizer's own rule (`add_bos_token`): one or none.

        `encode` leaves them out; with `encode_document`, all texts begin with them, except those of
        a chat template, which has its own rule.
        """
        token = begin_token(self._rust)
        id = None if token is None else self._rust.token_to_id(token)
        return [id] if id is not None and id == self.bos_token_id else []

    @cached_property
    def _added(self) -> dict[int, Any]:
        added: dict[int, Any] = self._rust.get_added_tokens_decoder()
        return added

    @cached_property
    def _word_ends(self) -> set[int]:
        return self._codec.word_ends() - self._added.keys()

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {token.content: id for id, token in self._added.items() if token.special}


class StreamDecoder:
    """Turns ids into text one at a time, for output that is shown while it is generated.

    A token may end inside a UTF-8 character, or, in GPT-1's vocabulary, with a word, which a space
    follows only if another token does. Bytes are held back until they are certain, so that the
    joined pieces equal the decoded text.

    Made by `Tokenizer.stream()`. `bytes_of(id)` gives the bytes of one token, `first_bytes_of(id)`
    the bytes of a text's first token; the last byte of the ids in `word_ends` is a space that
    stands only before another id. Where the text continues an earlier one, `after` is the last id
    of that.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        first_bytes_of: Callable[[int], bytes],
        word_ends: Collection[int],
        after: int | None,
    ) -> None:
        self._bytes_of, self._first_bytes_of = bytes_of, first_bytes_of
        self._word_ends = word_ends
        self._is_first = after is None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._blank = b""
        if after is not None and operator.index(after) in word_ends:
            self._blank = b" "

    def push(self, id: int) -> str:
        """Add an id; return the text that is now certain, possibly none.

        Raises UserError for an id outside the vocabulary; the decoder is then as before.
        """
        id = operator.index(id)
        text, ends_word = self._bytes_of(id), id in self._word_ends
        text, self._is_first = self._first_bytes_of(id) if self._is_first else text, False
        text = self._blank + (text[:-1] if ends_word else text)
        self._blank = b" " if ends_word else b""
        return self._decoder.decode(text)

    def finish(self) -> str:
        """Return the pending text, with U+FFFD for an incomplete character, and start again."""
        self._blank, self._is_first = b"", True
        return self._decoder.decode(b"", final=True)


def _checked_size(rust: tokenizers.Tokenizer, where: str) -> int:
    """Return the largest id + 1; refuse ids so large that they would exhaust the memory."""
    ids = rust.get_vocab(with_added_tokens=True).values()
    size = max(ids, default=-1) + 1
    if not ids or size > 2 * len(ids) + 1024 or len(set(ids)) < len(ids):
        raise CorruptInputError(
            f"{where}: {len(ids)} tokens have {len(set(ids))} different ids up to {size - 1}; it "
            "is damaged",
            hint="download it again",
        )
    return size


def _special_id(
    rust: tokenizers.Tokenizer, config: dict[str, Any], key: str, where: str
) -> int | None:
    """Return the id of the token that `config` names under `key`, else of `<|endoftext|>`.

    Return None if the vocabulary lacks `<|endoftext|>`, too.

    Raises CorruptInputError if the named token is not in the vocabulary.
    """
    is_named = config.get(key) is not None
    token = token_of(config, key) if is_named else END_OF_TEXT
    id: int | None = rust.token_to_id(token or "")
    if is_named and id is None:
        raise CorruptInputError(
            f"{where}: {CONFIG} names {config[key]!r} as {key}, which is not in the vocabulary; "
            "correct or remove that key"
        )
    return id


def _checked_texts(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        _refuse_surrogates(text, f" of text {number}")
        yield text


def _refuse_surrogates(text: str, where: str = "") -> None:
    if not isinstance(text, str):
        raise wrong_type(
            "Tokenizer", f"the text{where}", "str", text, hint="encode_batch takes a list of texts"
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"U+{ord(text[error.start]):04X}"
        raise UserError(
            f"at position {error.start}{where} is the lone surrogate {wrong}, "
            "which is not valid Unicode; read the text with errors='replace' or remove it"
        ) from error
