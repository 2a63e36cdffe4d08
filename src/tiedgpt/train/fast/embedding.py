"""W's gradient from reading is added into its gradient from predicting.

Plain autograd makes a (V, D) of zeros for the rows that were read and adds it to the dense gradient
that the head gives. Autograd adds a sparse gradient of those rows in place instead.

Gain: MEASURED.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tiedgpt.core.embedding import TiedEmbedding


class SparseReading(TiedEmbedding):
    """A TiedEmbedding whose gradient from reading is sparse, where W is a trained parameter."""

    def forward(self, ids: Tensor) -> Tensor:
        """Read: ids (B, T) -> (B, T, D)."""
        is_trained = isinstance(self.weight, nn.Parameter) and self.weight.requires_grad
        self.sparse = is_trained and not torch.compiler.is_compiling()
        try:
            return super().forward(ids)
        finally:
            self.sparse = False


@contextmanager
def dense_gradient(wte: nn.Module) -> Iterator[None]:
    """Make W's gradient dense where nothing but reading gave it one."""
    if not (isinstance(wte, SparseReading) and wte.weight.requires_grad):
        yield
        return
    handle = wte.weight.register_post_accumulate_grad_hook(_make_dense)
    try:
        yield
    finally:
        handle.remove()


def _make_dense(weight: Tensor) -> None:
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
