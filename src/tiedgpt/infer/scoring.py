"""How likely a text is under a model, token by token, without generating."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tiedgpt.errors import UserError
from tiedgpt.infer import filters
from tiedgpt.infer.session import Session

AT_A_TIME = 128
"""Tokens that are read at once: their (n, V) scores are held."""


@dataclass(frozen=True)
class Scored:
    """A text's tokens and what each cost."""

    ids: list[int]
    """All of them; the first is given, not predicted."""
    logprobs: list[float]
    """log P of each token after the first, in nats."""

    @property
    def total(self) -> float:
        """The sum: log P of the text after its first token."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """What the mean cost a token is the logarithm of."""
        return math.exp(-self.total / len(self.logprobs))


def score_ids(session: Session, ids: Sequence[int]) -> Scored:
    """Score ids in slot 0 of a session, each by all before it that its window holds.

    A text longer than the session's capacity is read in windows, each of which begins half a window
    after the one before: past the first, every token is predicted from at least half a window.
    """
    if len(ids) < 2:
        raise UserError("a text of one token has nothing to predict: give at least two")
    window, logprobs = session.capacity, list[float]()
    start = 0
    while True:
        session.cut(0, 0)
        end = min(start + window, len(ids) - 1)  # the last token is not read
        known = len(logprobs)  # ids up to this one are scored: only what follows is new
        if known > start:
            session.read([0], [ids[start:known]])
        for first in range(known, end, AT_A_TIME):
            part = ids[first : min(first + AT_A_TIME, end)]
            rows = session.read([0], [part], every=True)[0]
            for row, token in zip(rows, ids[first + 1 :], strict=False):
                logprobs.append(float(row[token]) - filters.log_normalizer(row))
        if end == len(ids) - 1:
            return Scored(list(ids), logprobs)
        start = end - window // 2
