"""A sequence as one vector: the last token's state, or the mean over all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads.head import Head
from tiedgpt.heads.padding import checked_lengths, is_token, last_state


class FeatureExtractor(Head):
    """The body's states after its final norm, pooled. It has no parameters of its own."""

    architecture = "Model"

    def __init__(self, gpt: GPT, *, pooling: Literal["last", "mean"] = "last") -> None:
        super().__init__(gpt)
        if pooling not in ("last", "mean"):
            raise UserError(f"pooling must be 'last' or 'mean', got {pooling!r}")
        self.pooling = pooling

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, T), lengths (B,) -> (B, D)."""
        h, lengths = self.gpt.body(ids), checked_lengths(ids, lengths)
        if self.pooling == "last":
            return last_state(h, lengths)
        return (h * is_token(ids, lengths)[..., None]).sum(1) / lengths[:, None]

    def config_keys(self) -> dict[str, Any]:
        """Return the pooling; transformers carries the key along."""
        return {"pooling": self.pooling}

    @classmethod
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        """Return the pooling; the last token's where the file does not say."""
        return {"pooling": config.get("pooling", "last")}
