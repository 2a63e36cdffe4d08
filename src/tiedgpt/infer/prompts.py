"""From prompts of text or ids to ids that the model can read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import cast

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import Prompt, is_id
from tiedgpt.text import Tokenizer

NOTHING_TO_SCORE = "a text to score must have a token after its context"


def prompt_ids(
    prompt: Prompt,
    config: GPTConfig,
    tokenizer: Tokenizer | None,
    *,
    allow_special: bool = False,
    continues: bool = False,
) -> list[int]:
    """Return the prompt's ids, checked against the vocabulary.

    A text begins with the tokenizer's `begin_ids`, unless it `continues` another. An empty prompt
    is the token that texts begin with. `allow_special` is as in `Tokenizer.encode`.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(
                "a prompt of text needs a tokenizer, and there is none with the model",
                hint="name one (--tokenizer, or Engine(..., tokenizer=)), or give ids",
            )
        encode = tokenizer.encode if continues else tokenizer.encode_document
        ids = encode(prompt, allow_special=allow_special)
    elif not _is_list(prompt):
        raise UserError(f"a prompt must be text or ids, got {prompt!r}")
    else:
        ids = [operator.index(token) if is_id(token) else token for token in prompt]
    if not ids:
        ids = [start_id(config)]
    if _is_list(ids[0]):
        raise UserError("a prompt must be text or ids, got a list of prompts, which generate takes")
    for token in ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise UserError(f"{token!r} is no id of a vocabulary of {config.vocab_size} tokens")
    return ids


def start_id(config: GPTConfig) -> int:
    """Return the id of the token at the start of texts, or raise `UserError`."""
    start = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if start is None:
        raise UserError(
            "the prompt is empty, and the model has no token that texts begin with",
            hint="give a text (--prompt)",
        )
    return start


def split_context(
    text: Prompt, context: Prompt | None, config: GPTConfig, tokenizer: Tokenizer | None
) -> tuple[list[int], int]:
    """Return the ids of a context and a text, and how many of them are the context's.

    Without a context, the first id is the context. Two texts are divided as in `split_choices`.
    """
    if context is None:
        ids = prompt_ids(text, config, tokenizer)
        if len(ids) < 2:
            raise UserError("a text of one token has nothing to predict")
        return ids, 1
    if isinstance(text, str) and isinstance(context, str):
        (ids,), n_context = split_choices([text], context, config, tokenizer)
        return ids, n_context
    context_ids = prompt_ids(context, config, tokenizer)
    if not len(text):
        raise UserError(NOTHING_TO_SCORE)
    text_ids = prompt_ids(text, config, tokenizer, continues=True)
    return [*context_ids, *text_ids], len(context_ids)


def split_choices(
    choices: Sequence[str], context: str, config: GPTConfig, tokenizer: Tokenizer | None
) -> tuple[list[list[int]], int]:
    """Return the ids of the context with each choice, and how many ids are the context's.

    Spaces at the end of the context belong to the choices. Context and choice are encoded as one
    text; the context's ids are the common prefix of the context alone and of all these texts. So a
    token that spans context and choice is scored, and all choices follow the same ids. If no id is
    left for the context, it is the token that texts begin with.
    """
    if not all(choices):
        raise UserError(NOTHING_TO_SCORE)
    context_text = context.rstrip() or context
    rows = [prompt_ids(context + choice, config, tokenizer) for choice in choices]
    context_ids = prompt_ids(context_text, config, tokenizer)
    if context_text:
        n_context = min(common_prefix(context_ids, row) for row in rows)
        if n_context == 0:
            rows, n_context = [[start_id(config), *row] for row in rows], 1
    else:
        rows, n_context = [context_ids + row for row in rows], len(context_ids)
    if min(map(len, rows)) <= n_context:
        raise UserError(NOTHING_TO_SCORE)
    return rows, n_context


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two lists of ids."""
    if list(a[: len(b)]) == list(b[: len(a)]):
        return min(len(a), len(b))
    return next(at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether a list was given."""
    if isinstance(prompts, str):
        return [prompts], False
    if not _is_list(prompts):
        raise UserError(f"{prompts!r} is neither a text nor ids, nor a list of them")
    if len(prompts) and is_id(prompts[0]):
        return [cast(Prompt, prompts)], False
    return list(cast(Sequence[Prompt], prompts)), True


def _is_list(value: object) -> bool:
    """Whether it is a list, or a tuple or an array of any library's."""
    if isinstance(value, (bytes, bytearray, Mapping, Set)):
        return False
    is_sized = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return is_sized and getattr(value, "shape", None) != ()
