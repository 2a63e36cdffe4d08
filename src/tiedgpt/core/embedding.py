"""The tied embedding: one matrix that reads tokens and predicts them.

Radford et al. 2018, eq. 2:  h_0 = U W_e + W_p,  ...,  P(u) = softmax(h_n W_e^T).
One parameter has both jobs, so no operation can untie them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.errors import UserError


class TiedEmbedding(nn.Embedding):
    """The matrix W of shape (V, D): an embedding that also predicts.

    `wte(ids)` reads: each id becomes its row of W. `wte.unembed(h)` predicts: h W^T.
    """

    weight: nn.Parameter

    def forward(self, ids: Tensor) -> Tensor:
        """Read: ids (B, T) -> (B, T, D). Raises `UserError` for ids outside the vocabulary."""
        try:
            return super().forward(ids)
        except IndexError:
            size = self.num_embeddings
            raise UserError(
                f"ids must be between 0 and {size - 1} for a vocabulary of {size} tokens, got "
                f"{int(ids.min())} to {int(ids.max())}"
            ) from None

    def unembed(self, h: Tensor) -> Tensor:
        """Predict: h (..., D) -> logits (..., V), the dot product of h with every row of W."""
        if self.weight.is_meta and not h.is_meta:  # torch would not refuse this
            raise UserError(
                "wte.weight was offloaded to the meta device, and predicting needs it as much as "
                "reading: keep wte on the device where the model computes"
            )
        return F.linear(h, self.weight)
