"""From one position's logits to one token: penalties, filters, and a seeded draw.

The order is that of transformers: bias, penalties, words that are ruled out, temperature, top-k,
top-p, min-p, typical-p. A draw takes one uniform number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

import numpy as np

from tiedgpt.errors import UserError
from tiedgpt.infer import filters
from tiedgpt.infer.filters import Array, Ids
from tiedgpt.text import Tokenizer

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""
Processor = Callable[[Sequence[int], int, Array], Array]
"""(ids of prompt and text, how many are the prompt's, logits (V,)) -> the logits to choose from."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; impossible values raise `UserError`, naming the field."""

    temperature: float = 1.0
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability (nucleus)."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    typical_p: float | None = None
    """Draw among the tokens about as surprising as expected that together reach this."""
    repetition_penalty: float = 1.0
    """Scores of tokens already in the text are divided (positive) or multiplied by this."""
    presence_penalty: float = 0.0
    """Taken from the scores of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Taken from the scores of tokens as often as they were generated before."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the scores of these ids; -inf rules one out."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Texts or sequences of ids that are never completed. A text is ruled out as it is encoded,
    alone and after a blank; spelt of other tokens it may still appear."""
    processors: Sequence[Processor] = ()
    """Functions that change the logits first, in turn."""

    def __post_init__(self) -> None:
        _require_in("temperature", self.temperature, 0, math.inf)
        _require_in("repetition_penalty", self.repetition_penalty, 1e-6, math.inf)
        for name in ("presence_penalty", "frequency_penalty"):
            _require_in(name, getattr(self, name), -math.inf, math.inf)
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise UserError(f"top_k={self.top_k!r} is not a positive whole number")
        for name in ("top_p", "typical_p"):
            if getattr(self, name) is not None:
                _require_in(name, getattr(self, name), 1e-9, 1)
        if self.min_p is not None:
            _require_in("min_p", self.min_p, 0, 1)
        _check_bias(self.logit_bias)
        _check_words(self.bad_words)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def for_vocabulary(self, size: int, tokenizer: Tokenizer | None) -> Self:
        """Return the same with bad words as ids; raise `UserError` for ids beyond `size`."""
        words: list[tuple[int, ...]] = []
        for word in self.bad_words:
            if not isinstance(word, str):
                words.append(tuple(word))
            elif tokenizer is None:
                raise UserError("bad_words of text need a tokenizer: give ids")
            else:
                words += [tuple(tokenizer.encode(text)) for text in _as_it_may_stand(word)]
        for name, ids in (("logit_bias", self.logit_bias), ("bad_words", chain(*words))):
            if beyond := [i for i in ids if i >= size]:
                raise UserError(f"{name} names {beyond[0]}, no id of a vocabulary of {size} tokens")
        return replace(self, bad_words=tuple(dict.fromkeys(filter(None, words))))

    def scores(self, logits: Array, seen: Sequence[int], n_prompt: int = 0) -> Array:
        """Logits (V,) -> the scores (V,) that are drawn from, -inf for what is filtered out.

        `seen` is the text so far, of which the first `n_prompt` ids were given.
        """
        kept, scores = self._filtered(self._adjusted(logits, seen, n_prompt))
        if kept is None:
            return scores
        whole = np.full(len(logits), -np.inf, np.float32)
        whole[kept] = scores
        return whole

    def choose(
        self, logits: Array, seen: Sequence[int], generator: np.random.Generator, n_prompt: int = 0
    ) -> int:
        """Return the next id after a text of ids `seen`, given the logits (V,) at its end."""
        scores = self._adjusted(logits, seen, n_prompt)
        require_choice(scores)
        if self.greedy:
            return int(scores.argmax())
        kept, scores = self._filtered(scores)
        at = filters.draw(scores, generator.random())
        return at if kept is None else int(kept[at])

    def _adjusted(self, logits: Array, seen: Sequence[int], n_prompt: int) -> Array:
        """Apply what changes single tokens' scores; the same array where nothing does."""
        for process in self.processors:
            logits = process(seen, n_prompt, logits)
        generated = seen[n_prompt:]
        repeats = self.repetition_penalty != 1 and len(seen) > 0
        counts = bool(self.presence_penalty or self.frequency_penalty) and len(generated) > 0
        if not (repeats or counts or self.logit_bias or self.bad_words):
            return logits
        scores = logits.copy()
        filters.add_bias(scores, self.logit_bias)
        if repeats:
            filters.penalize_repetition(scores, seen, self.repetition_penalty)
        if counts:
            presence, frequency = self.presence_penalty, self.frequency_penalty
            filters.penalize_counts(scores, generated, presence, frequency)
        words = [word for word in self.bad_words if not isinstance(word, str)]
        filters.forbid(scores, seen, words)
        return scores

    def _filtered(self, scores: Array) -> tuple[Ids | None, Array]:
        """Return the ids that may be drawn (None: all) and their scores."""
        if self.greedy:
            return None, scores
        if self.temperature != 1:
            scores = scores / np.float32(self.temperature)
        kept: Ids | None = None
        for name, keep in _FILTERS.items():
            value = getattr(self, name)
            if value is None or (value == 1 and name in ("top_p", "typical_p")):
                continue
            those = keep(scores, value)
            if those is not None:
                kept, scores = those if kept is None else kept[those], scores[those]
        return kept, scores


_FILTERS: dict[str, Callable[..., Ids | None]] = {
    "top_k": filters.top_k,
    "top_p": filters.top_p,
    "min_p": filters.min_p,
    "typical_p": filters.typical_p,
}


def require_choice(scores: Array) -> None:
    """Raise `UserError` where the highest of scores (V,) is no number, or none is above -inf."""
    highest = scores.max()
    if highest == -np.inf:
        raise UserError(
            "no token is left to choose from: logit_bias, bad_words or a constraint rules all of "
            "them out"
        )
    if not np.isfinite(highest):
        raise UserError("the model's scores are not numbers: its weights are damaged")


def _as_it_may_stand(word: str) -> tuple[str, ...]:
    """Return a word alone and after a blank: most vocabularies have other tokens there."""
    return (word,) if word[0].isspace() else (word, f" {word}")


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias={bias!r} is no mapping from ids to numbers")
    for token, value in bias.items():
        if type(token) is not int or token < 0:
            raise UserError(f"logit_bias names {token!r}, which is no id")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not value < math.inf:
            raise UserError(f"logit_bias gives {token} {value!r}, which is no number below inf")


def _check_words(words: Sequence[str | Sequence[int]]) -> None:
    if isinstance(words, str):
        raise UserError(f"bad_words={words!r} is one text: give a list, such as [text]")
    for word in words:
        whole = isinstance(word, str) or all(type(i) is int and i >= 0 for i in word)
        if not len(word) or not whole:
            raise UserError(f"bad_words has {word!r}: neither a text nor ids, or empty")


def _require_in(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or abs(value) == math.inf:  # type: ignore[operator, arg-type]
        raise UserError(f"{name}={value!r} is not a finite number from {low:g} to {high:g}")
