"""One matrix, two faces: it reads tokens and it predicts them.

Radford et al. 2018, eq. 2:  h_0 = U W_e + W_p,  ...,  P(u) = softmax(h_n W_e^T).
There is no second parameter to tie to the first, so nothing can untie them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.errors import UserError


class TiedEmbedding(nn.Module):
    """The matrix W of shape (V, D), read by rows and scored against by rows.

    `embed(ids) = ids' rows of W` is the forward; `unembed(h) = h W^T` is the other face.
    """

    def __init__(self, vocab_size: int, n_embd: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, n_embd))

    def forward(self, ids: Tensor) -> Tensor:
        """Read: ids (B, T) -> (B, T, D), each token its row of W."""
        try:
            return F.embedding(ids, self.weight)
        except IndexError:
            low, high = int(ids.min()), int(ids.max())
            size = self.weight.shape[0]
            raise UserError(
                f"ids from {low} to {high} do not fit a vocabulary of {size} tokens (0..{size - 1})"
            ) from None

    def unembed(self, h: Tensor) -> Tensor:
        """Predict: h (..., D) -> logits (..., V), h's dot product with every row of W."""
        return F.linear(h, self.weight)

    def extra_repr(self) -> str:
        """Describe the matrix in `print(model)`."""
        return f"{tuple(self.weight.shape)}, {READS_AND_PREDICTS}"


READS_AND_PREDICTS = "reads: ids -> rows of W, and predicts: logits = h W^T"
READS_ONLY = "reads: ids -> rows of W; the head predicts with a matrix of its own"
