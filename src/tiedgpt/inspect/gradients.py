"""Gradient of W in two parts: from the input embedding and from the output head.

The loss depends on W through h_0 = W[ids] and through logits = h W^T. Cutting the graph at h
separates the two gradients. Their sum is the gradient of a tied W (Press and Wolf 2017). In most
runs, the output part has a much larger norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.inspect.inputs import Model, Text, numpy, open_input, piece
from tiedgpt.inspect.results import NOT_IN_JSON, SHOWN_ROWS, Figure, Result, lines
from tiedgpt.plots.panel import Panel
from tiedgpt.plots.table import number_cell, number_table, token_cells, visible
from tiedgpt.runtime import eval_mode
from tiedgpt.tie.heads import find_head_layers, is_tied, require_gpt


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientSplit(Result):
    """The two parts of d loss / d W, for the mean loss of one text in nats."""

    reads: str  # name of the matrix that reads
    predicts: str  # name of the matrix that predicts: the same one in a tied model
    loss: float  # mean over the targets, in nats
    norm_read: float  # length of the gradient from reading
    norm_predict: float  # length of the gradient from predicting
    cosine: float  # of the two, which an untied model keeps apart; NaN if one is 0
    rows_read: np.ndarray  # (V,) length of each row's; 0 for tokens that the text does not have
    rows_predict: np.ndarray  # (V,)
    pieces: tuple[str, ...] = field(metadata=NOT_IN_JSON)  # (V,) the tokens' text
    residual: float  # |dW - (read + predict)| / |dW|, dW by an ordinary backward pass
    read: np.ndarray | None = field(metadata=NOT_IN_JSON)  # (V, D), if asked for
    predict: np.ndarray | None = field(metadata=NOT_IN_JSON)  # (V, D), if asked for

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        matrices = f"{self.reads} reads and predicts: both gradients are added"
        both = "their sum is the ordinary gradient"
        if self.reads != self.predicts:
            matrices = f"{self.reads} reads, {self.predicts} predicts: two matrices, untied"
            both = "each is its matrix's ordinary gradient"
        order = self._largest(top)
        rows = number_table(
            ("id", map(str, order)),
            ("token", token_cells((self.pieces[id] for id in order), 24)),
            ("from reading", self.rows_read[order]),
            ("from predicting", self.rows_predict[order]),
        )
        return (
            f"{matrices}\n"
            f"gradient of the loss: {number_cell(self.norm_read)} from reading, "
            f"{number_cell(self.norm_predict)} from predicting, cosine {number_cell(self.cosine)}\n"
            f"{both}; relative difference {number_cell(self.residual)}\n\n{rows}"
        )

    @override
    def figure(self) -> Figure:
        order = self._largest(40)
        parts = {
            "from reading": self.rows_read[order],
            "from predicting": self.rows_predict[order],
        }
        panel = Panel(
            f"reading {self.norm_read:.3g}, predicting {self.norm_predict:.3g}, "
            f"cosine {self.cosine:.3f}",
            "token",
            lines(parts, joined=False),
            y_label="norm of the row's gradient",
            x_names=[visible(self.pieces[id]) for id in order],
        )
        return "gradient of W: the rows with the largest gradient", [panel]

    def _largest(self, n: int) -> np.ndarray:
        return np.hypot(self.rows_read, self.rows_predict).argsort()[::-1][:n]


def gradient_split(
    model: Model, tokenizer: Any = None, text: Text = "", *, arrays: bool = False
) -> GradientSplit:
    """Return the gradient of the loss for W, split into its input and output part.

    The arguments are those of `positions`; `arrays` adds both (V, D) parts to the result. Dropout
    is off. The model's `.grad` and `requires_grad` do not change. Raises the errors of
    `positions`, and `UserError` for a single token or for an adapter on W.
    """
    inputs = open_input(model, tokenizer, text, least=2)
    gpt = require_gpt(inputs.model)
    matrices = vocab_parameters(gpt)
    ids, targets = inputs.ids[:, :-1], inputs.ids[0, 1:]
    with eval_mode(gpt), _only(gpt, matrices.values()), torch.enable_grad():
        loss, (read, *_), (*_, predict) = split_backward(gpt, ids, targets, matrices.values())
        assert read is not None and predict is not None
        sums = torch.autograd.grad(gpt.loss(ids, targets[None]), list(matrices.values()))
    norm_read, norm_predict = (_dot(g, g) ** 0.5 for g in (read, predict))
    lengths = norm_read * norm_predict
    split = [read, predict] if len(matrices) == 2 else [read + predict]
    apart = [
        float((both - parts).norm() / both.norm().clamp(min=1e-30))
        for both, parts in zip(sums, split, strict=True)
    ]
    return GradientSplit(
        reads="wte.weight",
        predicts=list(matrices)[-1],
        loss=float(loss),
        norm_read=norm_read,
        norm_predict=norm_predict,
        cosine=_dot(read, predict) / lengths if lengths else math.nan,
        rows_read=numpy(torch.linalg.vector_norm(read, dim=1)),
        rows_predict=numpy(torch.linalg.vector_norm(predict, dim=1)),
        pieces=tuple(piece(inputs.tokenizer, id) for id in range(gpt.config.vocab_size)),
        residual=max(apart),
        read=numpy(read) if arrays else None,
        predict=numpy(predict) if arrays else None,
    )


def split_backward(
    model: GPT, ids: Tensor, targets: Tensor, parameters: Iterable[Tensor]
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    """Return the loss, the gradients through the body, and those through the head.

    ids (1, T), targets (T,). The gradients are in the order of the parameters, None for a parameter
    that the path does not reach.
    """
    parameters = list(parameters)
    h = model.body(ids)
    cut = h.detach().requires_grad_()
    loss = model.head_loss(cut[0], targets)
    *by_head, by_h = torch.autograd.grad(loss, [*parameters, cut], allow_unused=True)
    by_body: list[Tensor | None] = [None] * len(parameters)
    if h.requires_grad:
        by_body = list(torch.autograd.grad(h, parameters, by_h, allow_unused=True))
    return loss.detach(), by_body, list(by_head)


def vocab_parameters(model: GPT) -> dict[str, Tensor]:
    """Return the input matrix and, for an untied model, the output matrix."""
    matrices: dict[str, Tensor] = {"wte.weight": model.wte.weight}
    if is_tied(model):
        return matrices
    layers = find_head_layers(model)
    if len(layers) != 1:
        raise UserError(
            f"the head has {len(layers)} matrices of {tuple(model.wte.weight.shape)}: its "
            "gradient is no one matrix's",
            hint="merge adapters first",
        )
    return matrices | {f"{name}.weight": layer.weight for name, layer in layers.items()}


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the sum of a * b (V, D) in float64, some rows at a time."""
    blocks = zip(a.split(4096), b.split(4096), strict=True)
    return sum(float((x.double() * y.double()).sum()) for x, y in blocks)


@contextmanager
def _only(model: GPT, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Require gradients for these parameters only, then restore `requires_grad`."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    try:
        for parameter in parameters:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)
