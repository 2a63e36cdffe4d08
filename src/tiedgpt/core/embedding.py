"""One matrix, two faces: it reads tokens and it predicts them.

Radford et al. 2018, eq. 2:  h_0 = U W_e + W_p,  ...,  P(u) = softmax(h_n W_e^T).
There is no second parameter to tie to the first, so nothing can untie them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tiedgpt.errors import UserError


@dataclass
class PredictingGradient:
    """The gradient (V, D) that W gets from predicting, once backward has come past the loss."""

    tensor: Tensor | None = None


class _Read(torch.autograd.Function):
    """W's rows; backward adds theirs to the gradient that W gets anyway.

    The loss comes first in backward and hands out its gradient of W; W itself waits for both of its
    uses, so what is added here in between is in the sum.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, predicting: PredictingGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.predicting = predicting
        ctx.shape = weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        whole, ctx.predicting.tensor = ctx.predicting.tensor, None
        theirs = whole is not None
        whole = grad.new_zeros(ctx.shape) if whole is None else whole
        whole.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        return None, None if theirs else whole, None


class TiedEmbedding(nn.Module):
    """The matrix W of shape (V, D), read by rows and scored against by rows.

    `embed(ids) = ids' rows of W` is the forward; `unembed(h) = h W^T` is the other face.
    """

    def __init__(self, vocab_size: int, n_embd: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, n_embd))

    def forward(self, ids: Tensor, predicting: PredictingGradient | None = None) -> Tensor:
        """Read: ids (B, T) -> (B, T, D), each token its row of W.

        With `predicting`, the gradient of the rows that were read is added to the one that W gets
        from predicting, instead of a (V, D) of zeros beside it.
        """
        try:
            if predicting is not None:
                return _Read.apply(ids, self.weight, predicting)  # type: ignore[no-untyped-call]
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
