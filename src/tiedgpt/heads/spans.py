"""Extractive question answering: where in a text the answer starts and ends."""

from __future__ import annotations

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.heads.head import Head, cross_entropy
from tiedgpt.heads.padding import checked_lengths, is_token


class SpanFinder(Head):
    """First and last token of an answer. The question stands before the text, which sees it."""

    architecture = "ForQuestionAnswering"
    own = ("qa_outputs.weight", "qa_outputs.bias")

    def __init__(self, gpt: GPT) -> None:
        super().__init__(gpt)
        self.qa_outputs = self.linear(2, bias=True)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> logits (B, T, 2) of starting and ending; padding is -inf."""
        logits = self.qa_outputs(self.gpt.body(ids))
        padding = ~is_token(ids, checked_lengths(ids, lengths))
        return logits.masked_fill(padding[..., None], float("-inf"))

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, T), lengths (B,), spans (B, 2) -> the mean cross-entropy of first and last token.

        A span of -100 is not counted.
        """
        ids, lengths, spans = batch
        return (cross_entropy(self(ids, lengths).transpose(1, 2), spans),)


def best_spans(logits: Tensor) -> Tensor:
    """Logits (B, T, 2) -> (B, 2): first and last token of the best span, first <= last."""
    starts, ends = logits.float().unbind(-1)
    # The best start up to each end, then the best end: O(T) instead of O(T^2) pairs.
    best, where = torch.cummax(starts, dim=1)
    last = (best + ends).argmax(dim=1)
    first = where.gather(1, last[:, None])[:, 0]
    return torch.stack((first, last), dim=1)
