"""From one position's logits to one token: penalties, filters, and a seeded draw.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiedgpt.errors import UserError

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


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
    repetition_penalty: float = 1.0
    """Scores of tokens already in the text are divided (positive) or multiplied by this."""

    def __post_init__(self) -> None:
        _require_in("temperature", self.temperature, 0, math.inf)
        _require_in("repetition_penalty", self.repetition_penalty, 1e-6, math.inf)
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise UserError(f"top_k={self.top_k!r} is not a positive whole number")
        if self.top_p is not None:
            _require_in("top_p", self.top_p, 1e-9, 1)
        if self.min_p is not None:
            _require_in("min_p", self.min_p, 0, 1)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def scores(self, logits: Tensor, seen: Sequence[int]) -> Tensor:
        """Logits (V,) -> the scores (V,) that are drawn from, -inf for what is filtered out."""
        scores = logits.float()
        if self.repetition_penalty != 1 and len(seen):
            ids = torch.tensor(
                [i for i in sorted(set(seen)) if i < scores.numel()], device=scores.device
            )
            old = scores[ids]
            penalty = self.repetition_penalty
            scores = scores.clone()
            scores[ids] = torch.where(old > 0, old / penalty, old * penalty)
        if self.greedy:
            return scores
        scores = scores / self.temperature
        if self.top_k is not None and self.top_k < scores.numel():
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = scores.sort()
            less_likely = ordered.softmax(0).cumsum(0) <= 1 - self.top_p
            less_likely[-1] = False  # the likeliest token always stays
            scores = scores.masked_fill(less_likely.scatter(0, order, less_likely), -torch.inf)
        if self.min_p is not None:
            p = scores.softmax(0)
            scores = scores.masked_fill(p < self.min_p * p.max(), -torch.inf)
        return scores

    def choose(self, logits: Tensor, seen: Sequence[int], generator: torch.Generator) -> int:
        """Return the next id after a text of ids `seen`, given the logits (V,) at its end."""
        if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
            raise UserError("the model's scores are not numbers: its weights are damaged")
        scores = self.scores(logits, seen)
        if self.greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(0), 1, generator=generator))


def _require_in(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        raise UserError(f"{name}={value!r} is not a number from {low:g} to {high:g}")
