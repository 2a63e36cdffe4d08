"""Prompts of text or ids -> ids that the model can read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer

Prompt = str | Sequence[int]


def prompt_ids(prompt: Prompt, config: GPTConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's ids, checked against the vocabulary.

    An empty prompt is the token that texts begin with.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(
                "a prompt of text needs a tokenizer, and there is none with the model: name "
                "one (--tokenizer, or Engine(..., tokenizer=)), or give ids"
            )
        ids = tokenizer.encode(prompt)
    else:
        ids = [operator.index(token) if is_id(token) else token for token in prompt]
    if not ids:
        start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
        if start is None:
            raise UserError(
                "the prompt is empty, and the model has no token to start from: give a text "
                "(--prompt)"
            )
        ids = [start]
    for token in ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise UserError(f"{token!r} is no id of a vocabulary of {config.vocab_size} tokens")
    return ids


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether a list was given."""
    if not hasattr(prompts, "__len__"):
        raise UserError(f"{prompts!r} is neither a text nor ids, nor a list of them")
    if isinstance(prompts, str) or (len(prompts) and is_id(prompts[0])):
        return [cast(Prompt, prompts)], False
    return list(cast(Sequence[Prompt], prompts)), True


def is_id(value: object) -> bool:
    """Whether it is a whole number of any library's, and no bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)
