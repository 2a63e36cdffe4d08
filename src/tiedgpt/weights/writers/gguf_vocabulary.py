"""A tokenizer as the pairs from which llama.cpp makes the same ids.

llama.cpp (`src/llama-vocab.cpp`) knows byte-level BPE under the name "gpt2" and GPT-2's way to cut
text under "gpt-2"; what cuts otherwise is refused, because its ids would silently differ.
"""

from __future__ import annotations

import json
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.text.bpe import BYTE_ALPHABET
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.dialects.gguf import ID_KEYS
from tiedgpt.weights.gguf_tokenizer import (
    CONTROL,
    KEYS,
    MODEL,
    NORMAL,
    SPLIT,
    UNUSED,
    USER_DEFINED,
)
from tiedgpt.weights.writers.gguf_pairs import Pair

_PLAIN_BPE = {
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "ignore_merges": False,
    "byte_fallback": False,
    "unk_token": None,
}


def vocabulary_pairs(tokenizer: Tokenizer | None, config: GPTConfig) -> dict[str, Pair]:
    """Return the pairs of a tokenizer for a model; rows without a token get an unused `[PADn]`.

    Raises `UserError` where llama.cpp has no such tokenizer, or the model fewer rows than tokens.
    """
    if tokenizer is None:
        raise UserError(
            "a GGUF file holds its tokenizer, and none is given: give the one that the model was "
            "trained with, or write another format"
        )
    stored = _require_gpt2(tokenizer)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
            f"{config.vocab_size:,}: give the tokenizer that it was trained with"
        )
    tokens, types = _tokens(stored, config.vocab_size)
    pairs = {
        f"{KEYS}model": Pair("text", MODEL),
        f"{KEYS}pre": Pair("text", SPLIT),
        f"{KEYS}tokens": Pair("text", tokens),
        f"{KEYS}token_type": Pair("i32", types),
        f"{KEYS}merges": Pair("text", [" ".join(merge) for merge in stored["model"]["merges"]]),
    }
    for name, key in ID_KEYS.items():
        of_config, of_tokenizer = getattr(config, name), getattr(tokenizer, name)
        id = of_tokenizer if of_config is None else of_config
        if id is not None and types[id] == UNUSED:
            raise UserError(
                f"the model's {name}={id} is no token of the tokenizer, which has "
                f"{len(tokenizer):,}: give the tokenizer that it was trained with"
            )
        if id is not None:
            pairs[key] = Pair("u32", id)
        elif name == "eos_token_id":
            raise UserError(
                "neither the model's config nor the tokenizer names an eos_token_id, and without "
                "one llama.cpp ends texts at token 11: set it in the config"
            )
    return pairs | {
        f"{KEYS}add_bos_token": Pair("bool", False),
        f"{KEYS}add_eos_token": Pair("bool", False),
    }


def _require_gpt2(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer.json of a tokenizer with which llama.cpp gives the same ids."""
    if tokenizer.kind == "char":
        raise UserError(
            "a character vocabulary cannot be written into GGUF: llama.cpp has none; train with a "
            "BPE, or write another format"
        )
    stored: dict[str, Any] = json.loads(tokenizer.to_json())
    model, cutter = stored["model"], stored["pre_tokenizer"] or {}
    odd = [key for key, plain in _PLAIN_BPE.items() if (model.get(key) or None) != (plain or None)]
    if tokenizer.kind != "bpe" or model.get("type") != "BPE" or odd:
        what = f" ({odd[0]}={model[odd[0]]!r})" if odd else ""
        raise UserError(
            f"a tokenizer of kind {tokenizer.kind!r}{what} cannot be written into GGUF: llama.cpp "
            "runs GPT-2's byte-level BPE alone; write another format"
        )
    cuts_alike = (
        cutter.get("type") == "ByteLevel"
        and cutter.get("use_regex") is True
        and cutter.get("add_prefix_space") is False
        and stored["normalizer"] is None
    )
    if not cuts_alike:
        raise UserError(
            "this tokenizer cuts text otherwise than GPT-2's, and in llama.cpp its ids would be "
            "others: it cannot be written into GGUF; write another format"
        )
    if missing := [byte for byte in BYTE_ALPHABET if byte not in model["vocab"]]:
        raise UserError(
            f"this tokenizer lacks {len(missing)} of the 256 bytes, and llama.cpp would leave text "
            "out without a word: it cannot be written into GGUF; write another format"
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
        while unused in taken:  # two tokens of one name end llama.cpp
            unused += "_"
        token, kind = of_id.get(id, (unused, UNUSED))
        tokens.append(token)
        types.append(kind)
    if len(set(tokens)) < n_rows or "" in taken:
        raise UserError(
            "this tokenizer has an empty token or one under two ids, which llama.cpp does not take"
        )
    return tokens, types
