"""Prompts of text or ids -> ids that the model can read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import cast

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.options import Prompt, is_id
from tiedgpt.text import Tokenizer


def prompt_ids(prompt: Prompt, config: GPTConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's ids, checked against the vocabulary.

    An empty prompt is the token that texts begin with.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(
                "a prompt of text needs a tokenizer, and there is none with the model",
                hint="name one (--tokenizer, or Engine(..., tokenizer=)), or give ids",
            )
        ids = tokenizer.encode(prompt)
    elif not _is_list(prompt):
        raise UserError(f"a prompt must be text or ids, got {prompt!r}")
    else:
        ids = [operator.index(token) if is_id(token) else token for token in prompt]
    if not ids:
        start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
        if start is None:
            raise UserError(
                "the prompt is empty, and the model has no token to start from",
                hint="give a text (--prompt)",
            )
        ids = [start]
    if _is_list(ids[0]):
        raise UserError("a prompt must be text or ids, got a list of prompts, which generate takes")
    for token in ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise UserError(f"{token!r} is no id of a vocabulary of {config.vocab_size} tokens")
    return ids


def split_context(
    text: Prompt, context: Prompt | None, config: GPTConfig, tokenizer: Tokenizer | None
) -> tuple[list[int], int]:
    """Return the ids of a text after its context, and how many of them are given.

    Without a context the first id is given. Texts are encoded as one, as they would be read.
    """
    if context is None:
        ids = prompt_ids(text, config, tokenizer)
        if len(ids) < 2:
            raise UserError("a text of one token has nothing to predict", hint="give at least two")
        return ids, 1
    if isinstance(text, str) and isinstance(context, str):  # a blank belongs to the next token
        begins = context.rstrip() or context
        context, text = begins, context[len(begins) :] + text
    given = prompt_ids(context, config, tokenizer)
    if isinstance(text, str) and isinstance(context, str) and context:
        ids = prompt_ids(context + text, config, tokenizer)
    else:
        ids = [*given, *prompt_ids(text, config, tokenizer)]
    if not len(text) or len(ids) <= len(given):
        raise UserError("a text to score must have a token after its context")
    return ids, len(given)


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
    return hasattr(value, "__len__") and getattr(value, "shape", None) != ()
