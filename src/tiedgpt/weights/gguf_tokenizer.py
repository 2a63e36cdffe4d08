"""The tokenizer inside a GGUF file, read and written: GPT-2's byte-level BPE, every id as it is.

Keys and token types as in ggml-org/llama.cpp `src/llama-vocab.cpp`: its model "gpt2" is a
byte-level BPE, its pre-tokenizer "gpt-2" is GPT-2's regex. A tokenizer that splits text
differently is not written, because in llama.cpp its ids would silently differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text.bpe import BYTE_ALPHABET, byte_level_tokenizer, unlike_gpt2
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.gguf import ARCHITECTURE, ID_KEYS, read_metadata

KEYS = "tokenizer.ggml."
ARRAYS = tuple(KEYS + name for name in ("tokens", "merges", "token_type"))
MODEL, SPLIT = "gpt2", "gpt-2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""llama.cpp's token types; an unused token only fills a row of the matrix."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file.

    Raises `UserError` where there is none or it is of another kind, `CorruptInputError` where it
    is damaged.
    """
    metadata = read_metadata(path, ARRAYS)
    _require_gpt2(path, metadata)
    tokens = _array(path, metadata, "tokens", str)
    merges = _merges(path, _array(path, metadata, "merges", str))
    types = [NORMAL] * len(tokens)
    if f"{KEYS}token_type" in metadata:
        types = _array(path, metadata, "token_type", int)
    if len(types) != len(tokens):
        raise CorruptInputError(f"{path} gives {len(tokens):,} tokens {len(types):,} types")
    used = [(token, id) for id, token in enumerate(tokens) if types[id] != UNUSED]
    ids = dict(used)
    if "" in ids or len(ids) < len(used):
        raise CorruptInputError(f"{path}: a token of the vocabulary is empty or occurs twice")
    _check(path, ids, merges)
    special = {side: _special_id(path, metadata, side, tokens, types) for side in ("bos", "eos")}
    control = {id for id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)}
    control |= {id for id in special.values() if id is not None}
    rust = byte_level_tokenizer(models.BPE(vocab=ids, merges=merges))
    rust.add_special_tokens([tokens[id] for id in sorted(control)])
    user_defined = (i for i, kind in enumerate(types) if kind == USER_DEFINED and i not in control)
    rust.add_tokens([tokenizers.AddedToken(tokens[id], normalized=False) for id in user_defined])
    settings = {f"{side}_token": tokens[id] for side, id in special.items() if id is not None}
    return Tokenizer(rust, settings, str(path))


def _require_gpt2(path: Path, metadata: dict[str, Any]) -> None:
    model = metadata.get(f"{KEYS}model")
    if model in (None, "none", "no_vocab"):
        raise UserError(f"{path} holds no tokenizer: give the one that its model was trained with")
    if model != MODEL:
        raise UserError(
            f"{path} holds a tokenizer of kind {str(model)[:40]!r}; GPT-2's byte-level BPE "
            f"({MODEL!r}) is read"
        )
    split = metadata.get(f"{KEYS}pre")
    from_2023 = split is None and metadata.get("general.architecture") == ARCHITECTURE
    if split != SPLIT and not from_2023:
        raise UserError(
            f"{path} holds a BPE that splits text by the rule {str(split)[:40]!r}; GPT-2's "
            f"({SPLIT!r}) is read"
        )


def _array(path: Path, metadata: dict[str, Any], name: str, kind: type) -> list[Any]:
    array = metadata.get(f"{KEYS}{name}")
    if not isinstance(array, list) or not all(type(item) is kind for item in array):
        what = "UTF-8 strings" if kind is str else "integers"
        raise CorruptInputError(f"{path}: {KEYS}{name} is missing or no array of {what}")
    return array


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
    path: Path, metadata: dict[str, Any], side: str, tokens: list[str], types: list[int]
) -> int | None:
    id = metadata.get(f"{KEYS}{side}_token_id")
    if id is None:
        return None
    if type(id) is not int or not 0 <= id < len(tokens) or types[id] == UNUSED:
        raise CorruptInputError(
            f"{path}: {KEYS}{side}_token_id={id!r} is no id of its {len(tokens):,} tokens"
        )
    return id


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llama.cpp stores it."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    special_ids: dict[str, int]
    """Under GGUF's keys."""


def vocabulary(tokenizer: Tokenizer | None, config: GPTConfig) -> Vocabulary:
    """Return a tokenizer as a GGUF file has it; rows without a token get an unused `[PADn]`.

    Raises `UserError` where llama.cpp has no such tokenizer, or the model fewer rows than tokens.
    """
    if tokenizer is None:
        raise UserError(
            "a GGUF file holds its tokenizer, and none is given: give the one that the model was "
            "trained with, or write another format"
        )
    stored = _llama_cpps(tokenizer)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
            f"{config.vocab_size:,}: give the tokenizer that it was trained with"
        )
    tokens, types = _tokens(stored, config.vocab_size)
    special_ids = {}
    for name, key in ID_KEYS.items():
        of_config, of_tokenizer = getattr(config, name), getattr(tokenizer, name)
        id = of_tokenizer if of_config is None else of_config
        if id is not None and types[id] == UNUSED:
            raise UserError(
                f"the model's {name}={id} is no token of the tokenizer, which has "
                f"{len(tokenizer):,}: give the tokenizer that it was trained with"
            )
        if id is not None:
            special_ids[key] = id
        elif name == "eos_token_id":
            raise UserError(
                "neither the model's config nor the tokenizer names an eos_token_id, and without "
                "one llama.cpp ends texts at token 11: set it in the config"
            )
    merges = [" ".join(merge) for merge in stored["model"]["merges"]]
    if not merges:
        raise UserError(
            "a tokenizer without merges cannot be written into GGUF: its library writes no empty "
            "list; write another format"
        )
    return Vocabulary(tokens, types, merges, special_ids)


def _llama_cpps(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer.json of a tokenizer with which llama.cpp gives the same ids."""
    if tokenizer.kind == "char":
        raise UserError(
            "a character vocabulary cannot be written into GGUF: llama.cpp has none; train with a "
            "BPE, or write another format"
        )
    stored: dict[str, Any] = json.loads(tokenizer.to_json())
    if tokenizer.kind != "bpe":
        raise UserError(
            f"a tokenizer of kind {tokenizer.kind!r} cannot be written into GGUF: llama.cpp runs "
            "GPT-2's byte-level BPE alone; write another format"
        )
    if odd := unlike_gpt2(stored):
        raise UserError(
            f"this tokenizer's {odd[0]} is not GPT-2's, so llama.cpp would give other ids: it "
            "cannot be written into GGUF; write another format"
        )
    vocabulary = stored["model"]["vocab"]
    if missing := [byte for byte in BYTE_ALPHABET if byte not in vocabulary]:
        raise UserError(
            f"this tokenizer lacks {len(missing)} of the 256 bytes, and llama.cpp would drop text "
            "silently: it cannot be written into GGUF; write another format"
        )
    return stored


def _tokens(stored: dict[str, Any], n_rows: int) -> tuple[list[str], list[int]]:
    """Return every row's token and type."""
    ids: dict[str, int] = stored["model"]["vocab"]
    of_id = {id: (token, NORMAL) for token, id in ids.items()}
    for added in stored["added_tokens"]:
        of_id[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    taken = {token for token, _ in of_id.values()}
    tokens, types = [], []
    for id in range(n_rows):
        unused = f"[PAD{id}]"
        while unused in taken:  # llama.cpp refuses a vocabulary with the same token twice
            unused += "_"
        token, kind = of_id.get(id, (unused, UNUSED))
        tokens.append(token)
        types.append(kind)
    if len(set(tokens)) < n_rows or "" in taken:
        raise UserError(
            "this tokenizer has an empty token or one under two ids, which llama.cpp does not take"
        )
    return tokens, types
