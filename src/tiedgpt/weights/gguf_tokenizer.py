"""The tokenizer inside a GGUF file: GPT-2's byte-level BPE, with every id as it stands there.

Keys and token types as in ggml-org/llama.cpp `src/llama-vocab.cpp`, whose model "gpt2" is a
byte-level BPE and whose pre-tokenizer "gpt-2" is GPT-2's regex.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text.bpe import BYTE_ALPHABET, byte_level_tokenizer
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.formats.gguf_file import STRING, StoredArray, read_pairs

KEYS = "tokenizer.ggml."
MODEL, SPLIT = "gpt2", "gpt-2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""llama.cpp's types of tokens; an unused one only fills the matrix up."""


def tokenizer_in(path: Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file.

    Raises `UserError` where there is none or it is of another kind, `CorruptInputError` where it
    is damaged.
    """
    pairs = read_pairs(path)
    _require_gpt2(path, pairs)
    tokens = _array(path, pairs, "tokens", str)
    merges = _merges(path, _array(path, pairs, "merges", str))
    types = [NORMAL] * len(tokens)
    if f"{KEYS}token_type" in pairs:
        types = _array(path, pairs, "token_type", int)
    if len(types) != len(tokens):
        raise CorruptInputError(f"{path} gives {len(tokens):,} tokens {len(types):,} types")
    ids = {
        token: id
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != UNUSED
    }
    if "" in ids or len(ids) + types.count(UNUSED) < len(tokens):
        raise CorruptInputError(f"{path}: a token is empty or stands twice in the vocabulary")
    _check(path, ids, merges)
    special = {side: _special_id(path, pairs, side, tokens, types) for side in ("bos", "eos")}
    marked = {id for id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)}
    marked |= {id for id in special.values() if id is not None}
    rust = byte_level_tokenizer(models.BPE(vocab=ids, merges=merges))
    rust.add_special_tokens([tokens[id] for id in sorted(marked)])
    rust.add_tokens(
        [
            tokenizers.AddedToken(tokens[id], normalized=False)
            for id, kind in enumerate(types)
            if kind == USER_DEFINED and id not in marked
        ]
    )
    settings = {f"{side}_token": tokens[id] for side, id in special.items() if id is not None}
    return Tokenizer(rust, settings, str(path))


def _require_gpt2(path: Path, pairs: dict[str, Any]) -> None:
    model = pairs.get(f"{KEYS}model")
    if model in (None, "none", "no_vocab"):
        raise UserError(f"{path} holds no tokenizer: give the one that its model was trained with")
    if model != MODEL:
        raise UserError(
            f"{path} holds a tokenizer of kind {str(model)[:40]!r}; GPT-2's byte-level BPE "
            f"({MODEL!r}) is read"
        )
    split = pairs.get(f"{KEYS}pre")
    silent = split is None and pairs.get("general.architecture") == "gpt2"  # as until April 2024
    if split != SPLIT and not silent:
        raise UserError(
            f"{path} holds a BPE that cuts text by the rule {str(split)[:40]!r}; GPT-2's "
            f"({SPLIT!r}) is read"
        )


def _array(path: Path, pairs: dict[str, Any], name: str, item: type) -> list[Any]:
    array = pairs.get(f"{KEYS}{name}")
    if not isinstance(array, StoredArray) or (array.item_kind == STRING) != (item is str):
        what = "texts" if item is str else "whole numbers"
        raise CorruptInputError(f"{path}: {KEYS}{name} is missing or no array of {what}")
    return array.values()


def _merges(path: Path, lines: list[str]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise CorruptInputError(f"{path}: merge {number}, {line[:40]!r}, is not two tokens")
        merges.append((left, right))
    return merges


def _check(path: Path, ids: dict[str, int], merges: list[tuple[str, str]]) -> None:
    if not ids.keys() >= set(BYTE_ALPHABET):
        raise UserError(
            f"{path}: the vocabulary lacks some of the 256 bytes, so it is not byte-level; use a "
            "model with a byte-level BPE, as GPT-2's"
        )
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in ids:
                raise CorruptInputError(
                    f"{path}: the merge {left[:40]!r} {right[:40]!r} needs {token[:40]!r}, which "
                    "is not in the vocabulary"
                )


def _special_id(
    path: Path, pairs: dict[str, Any], side: str, tokens: list[str], types: list[int]
) -> int | None:
    id = pairs.get(f"{KEYS}{side}_token_id")
    if id is None:
        return None
    if type(id) is not int or not 0 <= id < len(tokens) or types[id] == UNUSED:
        raise CorruptInputError(
            f"{path}: {KEYS}{side}_token_id={id!r} is no id of its {len(tokens):,} tokens"
        )
    return id
