"""The logprob and rank of each token of a text under a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tiedgpt.infer.slots import SCORED_AT_ONCE, Decoding, SlotPool, TokensToRun


@dataclass(frozen=True)
class Scored:
    """The tokens of a text with their logprobs and ranks."""

    ids: list[int]
    """All ids, with the context's."""
    n_context: int
    """How many of the first ids are the context, which is not scored."""
    logprobs: list[float]
    """Logprob of each id after the context, in nats."""
    ranks: list[int]
    """Rank of each of these ids; 1 is the likeliest.

    Rows of W without a token are not counted; `logprobs` are over all rows.
    """

    @property
    def total(self) -> float:
        """The logprob of the text after its context: the sum."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative logprob of a token."""
        return math.exp(-self.total / len(self.logprobs))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have written the text after this context."""
        return all(rank == 1 for rank in self.ranks)


def score_text(
    pool: SlotPool, slot_ids: Sequence[int], ids: Sequence[int], n_context: int, n_tokens: int
) -> Decoding[Scored]:
    """Score the ids from `n_context` on; ranks are among the ids below `n_tokens`.

    A text longer than the model's context is read in windows, each half a window after the one
    before: after the first window, every token is predicted from at least half a window.
    """
    logprobs, ranks = list[float](), list[int]()
    session, (slot_id,) = pool.session, slot_ids
    window, n_known = session.capacity, n_context
    start = 0 if n_known <= window else n_known - window // 2
    while True:
        end = min(start + window, len(ids) - 1)  # the last token is not read
        at = start + session.lengths[slot_id]
        if at < n_known - 1:
            yield [TokensToRun(slot_id, ids[at : n_known - 1])]
        for first in range(n_known - 1, end, SCORED_AT_ONCE):
            targets = ids[first + 1 : min(first + SCORED_AT_ONCE, end) + 1]
            chunk = ids[first : first + len(targets)]
            (result,) = yield [TokensToRun(slot_id, chunk, all_logits=True)]
            new_logprobs, new_ranks = session.score_targets(result.logits, targets, n_tokens)
            logprobs += new_logprobs
            ranks += new_ranks
        if end == len(ids) - 1:
            return Scored(list(ids), n_context, logprobs, ranks)
        n_known, start = end + 1, end - window // 2
        pool.truncate(slot_id, 0)
