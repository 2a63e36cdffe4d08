"""A sequence as one vector: the last token's state, or the mean over all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads.head import Head
from tiedgpt.heads.padding import at_last, real, whole

Pooling = Literal["last", "mean"]


class FeatureExtractor(Head):
    """States of the body after its final norm, pooled; there is nothing of its own to train."""

    architecture = "Model"

    def __init__(self, gpt: GPT, *, pooling: Pooling = "last") -> None:
        super().__init__(gpt)
        if pooling not in ("last", "mean"):
            raise UserError(f"pooling={pooling!r} is neither 'last' nor 'mean'")
        self.pooling = pooling

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> (B, D)."""
        h, lengths = self.gpt.body(ids), whole(ids, lengths)
        if self.pooling == "last":
            return at_last(h, lengths)
        return (h * real(ids, lengths)[..., None]).sum(1) / lengths[:, None]

    def description(self) -> dict[str, Any]:
        """Keep how states are pooled; transformers carries the key along."""
        return {"pooling": self.pooling}

    @classmethod
    def options_from(
        cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Return how states are pooled; the last token's where the file does not say."""
        return {"pooling": config.get("pooling", "last")}
