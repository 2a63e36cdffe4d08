"""From one position's logits to one token: penalties, filters, and a seeded draw.

The order is that of transformers: bias, penalties, (top-n-sigma,) top-k, temperature, top-p, min-p,
(XTC). A draw takes one random number, and XTC another. This is the definition in numpy;
`kernels/sampling.py` chooses the same tokens for a whole batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tiedgpt.errors import UserError
from tiedgpt.infer import filters
from tiedgpt.infer.filters import Array, Ids
from tiedgpt.infer.generation_config import NEUTRAL, GenerationConfig


@dataclass(slots=True)
class SamplingInput:
    """Everything that the next token of a sequence depends on."""

    config: GenerationConfig
    logits: Array
    """(V,), after the processors."""
    seen: Sequence[int]
    """The ids of prompt and text."""
    n_prompt: int
    """How many of these are the prompt's."""
    n_tokens: int
    """Ids from here on have no token and are never chosen."""
    uniform: float = 0.0
    """A random number from [0, 1) for the draw."""
    uniforms: dict[str, float] = field(default_factory=dict)
    """The options' own random numbers from [0, 1), by their names in `UNIFORMS`."""
    spared: Collection[int] = ()
    """Ids that XTC does not exclude: those of a line break and of the ends of the text."""
    model_logits: Array | None = None
    """(V,), the model's logits if processors changed them; logprobs are of these."""


class NextToken(NamedTuple):
    """A token, and its logprob under the model itself: softmax over all V logits."""

    token: int
    logprob: float


def sample(inputs: Sequence[SamplingInput]) -> list[NextToken | UserError]:
    """Sample a token for each row; a row without a possible token gets an error."""
    return [_sample(row) for row in inputs]


def _sample(row: SamplingInput) -> NextToken | UserError:
    logits = row.logits[: row.n_tokens]
    scores = adjust_logits(row.config, logits, row.seen, row.n_prompt)
    if (error := no_token_error(float(scores.max()))) is not None:
        return error
    if row.config.greedy:
        token = int(scores.argmax())
    else:
        ids = filter_logits(row, scores)
        p = filters.masses(scores[ids], row.config.temperature)
        token = int(ids[filters.draw(p, row.uniform)])
    logits = row.logits if row.model_logits is None else row.model_logits
    return NextToken(token, float(logits[token]) - filters.log_normalizer(logits))


def check_ids(config: GenerationConfig, size: int) -> None:
    """Raise `UserError` for options that name ids beyond the vocabulary."""
    for name in ("logit_bias", "stop_ids"):
        if beyond := [token for token in getattr(config, name) if token >= size]:
            raise UserError(
                f"names {beyond[0]}, no id of a vocabulary of {size} tokens", option=name
            )


def adjust_logits(
    config: GenerationConfig, logits: Array, seen: Sequence[int], n_prompt: int = 0
) -> Array:
    """Return logits (V,) with biases and penalties applied; the same array if there are none.

    `seen` are the ids of prompt and text, `n_prompt` of them the prompt's.
    """
    generated = seen[n_prompt:]
    repeats = config.repetition_penalty != 1 and len(seen) > 0
    counts = bool(config.presence_penalty or config.frequency_penalty) and len(generated) > 0
    if not (repeats or counts or config.logit_bias):
        return logits
    scores = logits.copy()
    filters.add_bias(scores, config.logit_bias)
    if repeats:
        filters.penalize_repetition(scores, seen, config.repetition_penalty)
    if counts:
        presence, frequency = config.presence_penalty, config.frequency_penalty
        filters.penalize_counts(scores, generated, presence, frequency)
    return scores


def filter_logits(row: SamplingInput, scores: Array) -> Ids:
    """Return the ids that may be drawn by adjusted logits (V,), from the lowest."""
    numbers, ids = row.config.numbers, np.flatnonzero(scores > -np.inf)
    for name, keep in SAMPLING_STAGES.items():
        if numbers[name] != NEUTRAL[name]:
            ids = ids[keep(scores[ids], numbers, ids, row)]
    return ids


def _xtc(scores: Array, numbers: Mapping[str, Any], ids: Ids, row: SamplingInput) -> Ids:
    if row.uniforms.get("xtc_uniform", 0.0) >= numbers["xtc_probability"]:
        return np.arange(len(ids))
    spared = np.isin(ids, list(row.spared))
    return filters.xtc(scores, numbers["temperature"], numbers["xtc_threshold"], spared)


SAMPLING_STAGES: dict[str, Callable[[Array, Mapping[str, Any], Ids, SamplingInput], Ids]] = {
    "top_n_sigma": lambda scores, x, *_: filters.top_n_sigma(scores, x["top_n_sigma"]),
    "top_k": lambda scores, x, *_: filters.top_k(scores, x["top_k"]),
    "top_p": lambda scores, x, *_: filters.top_p(scores, x["temperature"], x["top_p"]),
    "min_p": lambda scores, x, *_: filters.min_p(scores, x["temperature"], x["min_p"]),
    "xtc_probability": _xtc,
}
"""The filters in their order, by the option that turns each on.

Each gets the scores and the ids that are left, and returns the indices of those that stay.
"""


def no_token_error(highest: float) -> UserError | None:
    """Return the error if the highest logit is not finite, so that no token can be chosen."""
    if math.isfinite(highest):
        return None
    if highest == -math.inf:
        return UserError(
            "no token is left to choose from: logit_bias, min_new_tokens or a constraint rules all "
            "of them out"
        )
    return UserError("the model's logits are not numbers: its weights are damaged")
