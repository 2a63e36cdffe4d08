"""The tokenizer inside a GGUF file, read and written: GPT-2's byte-level BPE, with every id.

Keys and token types as in ggml-org/llama.cpp `src/llama-vocab.cpp`: its model "gpt2" is a
byte-level BPE, its pre-tokenizer "gpt-2" is GPT-2's regex. A tokenizer that splits text
differently is not written, because in llama.cpp its ids would silently differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import models

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.files import reading
from tiedgpt.text.bpe import (
    BYTE_ALPHABET,
    add_ends,
    byte_level_tokenizer,
    greedy_tokens,
    unlike_gpt2,
)
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.gguf import ARCHITECTURE, ID_KEYS, read_header

KEYS = "tokenizer.ggml."
ARRAYS = {KEYS + "tokens": str, KEYS + "merges": str, KEYS + "token_type": int}
BEGINS = KEYS + "add_bos_token"
MODEL, SPLIT = "gpt2", "gpt-2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""llama.cpp's token types; an unused token only fills a row of the matrix."""


def read_tokenizer(file: OpenFile) -> Tokenizer:
    """Read the tokenizer of a GGUF file.

    Raises `UserError` if none exists or it is of another kind, `CorruptInputError` if it
    is damaged.
    """
    path = file.path
    metadata, _ = read_header(file, ARRAYS)
    model, split = metadata.get(KEYS + "model"), metadata.get(KEYS + "pre")
    if split is None and metadata.get("general.architecture") == ARCHITECTURE:
        split = SPLIT  # before 2024 the split had no name
    if (model, split) != (MODEL, SPLIT):
        raise UserError(
            f"{path} holds no tokenizer of GPT-2's kind: its model is {str(model)[:40]!r}, its "
            f"split {str(split)[:40]!r}; {MODEL!r} and {SPLIT!r} are read",
            hint="give the tokenizer that the model was trained with",
        )
    metadata.setdefault(KEYS + "token_type", [NORMAL] * len(metadata.get(KEYS + "tokens") or ()))
    with reading(path, "tokenizer of GGUF"):
        for key, value in ARRAYS.items():
            array = metadata.get(key)
            if not isinstance(array, list) or not all(type(item) is value for item in array):
                raise ValueError(f"{key} is missing or no array of {value.__name__}")
        tokens, lines, types = (metadata[key] for key in ARRAYS)
        used = [id for id, value in enumerate(types[: len(tokens)]) if value != UNUSED]
        ids = {tokens[id]: id for id in used}
        if len(types) != len(tokens) or "" in ids or len(ids) < len(used):
            raise ValueError("a token has no type of its own, is empty, or occurs twice")
        if not ids.keys() >= set(BYTE_ALPHABET):
            raise UserError(
                f"{path}: the vocabulary lacks some of the 256 bytes, so it is not byte-level",
                hint="use a model with a byte-level BPE, as GPT-2's",
            )
        merges = [tuple(line.split(" ")) for line in lines]
        for merge in merges:
            if len(merge) != 2 or not ids.keys() >= {*merge, "".join(merge)}:
                raise ValueError(f"the merge {' '.join(merge)[:80]!r} is not of two tokens")
        special = {name: metadata[key] for name, key in ID_KEYS.items() if key in metadata}
        for name, id in special.items():
            if type(id) is not int or not 0 <= id < len(tokens) or types[id] == UNUSED:
                raise ValueError(f"{name}={id!r} is none of its {len(tokens):,} tokens")
    rust = byte_level_tokenizer(models.BPE(vocab=ids, merges=merges))
    control = {id for id, value in enumerate(types) if value in (UNKNOWN, CONTROL)}
    control.update(special.values())
    rust.add_special_tokens([tokens[id] for id in sorted(control)])
    user_defined = (
        i for i, value in enumerate(types) if value == USER_DEFINED and i not in control
    )
    rust.add_tokens([tokenizers.AddedToken(tokens[id], normalized=False) for id in user_defined])
    settings = {name.removesuffix("_id"): tokens[id] for name, id in special.items()}
    if metadata.get(BEGINS) is True and "bos_token" in settings:
        add_ends(rust, bos=settings["bos_token"])
    return Tokenizer(rust, settings, str(path))


def add_tokenizer(
    writer: Any, tokenizer: Tokenizer | None, config: GPTConfig, end_ids: Sequence[int]
) -> None:
    """Add a tokenizer to a `gguf.GGUFWriter`; rows without a token get an unused `[PADn]`.

    The first of `end_ids` that is not the end of text ends a turn. Raises `UserError` where
    llama.cpp has no such tokenizer.
    """
    if tokenizer is None:
        raise UserError(
            "a GGUF file holds its tokenizer, and none is given",
            hint="give the one that the model was trained with, or write another format",
        )
    stored: dict[str, Any] = json.loads(tokenizer.to_json())
    model = stored["model"]
    _refuse_unlike_gpt2(tokenizer, stored)
    of_id = {id: (token, NORMAL) for token, id in model["vocab"].items()}
    for added in stored["added_tokens"]:
        of_id[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    taken = {token for token, _ in of_id.values()}
    tokens, types = [], []
    for id in range(config.vocab_size):
        unused = f"[PAD{id}]"
        while unused in taken:  # llama.cpp refuses a vocabulary with the same token twice
            unused += "_"
        token, token_type = of_id.get(id, (unused, UNUSED))
        tokens.append(token)
        types.append(token_type)
    if len(taken) < len(of_id) or "" in taken:
        raise UserError("llama.cpp takes no tokenizer with an empty token or one under two ids")
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(SPLIT)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    for name, key in ID_KEYS.items():
        id = getattr(tokenizer if getattr(config, name) is None else config, name)
        if id is None and name == "eos_token_id":
            raise UserError(
                "neither the model's config nor the tokenizer names an eos_token_id, and without "
                "one llama.cpp ends texts at token 11",
                hint="set it in the config",
            )
        if id is not None and types[id] == UNUSED:
            raise UserError(
                f"the model's {name}={id} is no token of the tokenizer, which has "
                f"{len(tokenizer):,}",
                hint="give the tokenizer that it was trained with",
            )
        if id is not None:
            writer.add_uint32(key, id)
    for end in [i for i in end_ids if i != id][:1]:  # the last of ID_KEYS is the end's
        writer.add_eot_token_id(end)
    writer.add_add_bos_token(bool(tokenizer.begin_ids))
    writer.add_add_eos_token(False)


def _refuse_unlike_gpt2(tokenizer: Tokenizer, stored: dict[str, Any]) -> None:
    """Raise `UserError` for a tokenizer for which llama.cpp would give other ids."""
    why = ""
    if tokenizer.kind != "bpe":
        why = f"is of kind {tokenizer.kind!r}"
    elif odd := unlike_gpt2(stored):
        why = f"has another {odd[0]}"
    elif greedy := greedy_tokens(stored):
        why = f"has {greedy[0]!r}, which takes spaces beside it or whole words only"
    elif missing := set(BYTE_ALPHABET) - stored["model"]["vocab"].keys():
        why = f"lacks {len(missing)} of the 256 bytes"
    elif not stored["model"]["merges"]:
        why = "is without merges, and GGUF's library writes no empty list"
    if why:
        raise UserError(
            f"this tokenizer {why}: it cannot be written into GGUF, for llama.cpp runs GPT-2's "
            "byte-level BPE alone",
            hint="write another format",
        )
