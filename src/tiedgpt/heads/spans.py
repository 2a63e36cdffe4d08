"""Where in a text the answer stands: a score for beginning and one for ending at each token."""

from __future__ import annotations

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.heads.head import Head, cross_entropy
from tiedgpt.heads.padding import real, whole


class SpanFinder(Head):
    """First and last token of an answer. The question comes before the text: each token sees it."""

    architecture = "ForQuestionAnswering"
    own = ("qa_outputs.weight", "qa_outputs.bias")

    def __init__(self, gpt: GPT) -> None:
        super().__init__(gpt)
        self.qa_outputs = self.linear(2, bias=True)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> (B, T, 2): scores of starting and ending, padding -inf."""
        scores = self.qa_outputs(self.gpt.body(ids))
        padding = ~real(ids, whole(ids, lengths))
        return scores.masked_fill(padding[..., None], float("-inf"))

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Take ids (B, T), lengths (B,), spans (B, 2): mean cross-entropy of first and last token.

        A span of -100 is not counted.
        """
        ids, lengths, spans = batch
        return (cross_entropy(self(ids, lengths).transpose(1, 2), spans),)


def best_spans(scores: Tensor) -> Tensor:
    """Scores (B, T, 2) -> (B, 2): first and last token of the best span, first <= last."""
    starts, ends = scores.float().unbind(-1)
    # The best start up to each end, then the best end: O(T) where all pairs would be O(T^2).
    best, where = torch.cummax(starts, dim=1)
    last = (best + ends).argmax(dim=1)
    first = where.gather(1, last[:, None])[:, 0]
    return torch.stack((first, last), dim=1)
