"""Nearest rows of W to one token's row, by dot product, cosine and centred cosine.

The three differ, and a model computes only the dot product. Cosine and dot product change
when the mean row is subtracted from all rows, which changes no probability; centred cosine does
not (Mu and Viswanath 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tiedgpt.inspect.inputs import Model, numpy, open_model, piece, token_id
from tiedgpt.inspect.results import SHOWN_ROWS, Figure, Result, lines
from tiedgpt.inspect.vocab_matrices import VocabMatrix, finite_vocab_matrices
from tiedgpt.options import read_number
from tiedgpt.plots.panel import Grid, Panel
from tiedgpt.plots.table import number_table, token_cells, visible
from tiedgpt.runtime import eval_mode


@dataclass(frozen=True, kw_only=True)
class NearestRows:
    """The k rows of one matrix that are nearest to row e_i, by each measure; i is left out."""

    name: str  # of the parameter
    does: str  # "reads", "predicts", or "reads and predicts"
    dot_ids: np.ndarray  # (k,)
    dot: np.ndarray  # (k,) e_i . e_j
    cos_ids: np.ndarray  # (k,)
    cos: np.ndarray  # (k,) of e_i and e_j
    centred_cos_ids: np.ndarray  # (k,)
    centred_cos: np.ndarray  # (k,) of c_i and c_j: the rows less the mean row


@dataclass(frozen=True, kw_only=True, repr=False)
class Neighbours(Result):
    """The neighbours of one token, in one matrix if the model is tied, else in both."""

    id: int
    piece: str  # the token's text
    matrices: tuple[NearestRows, ...]
    words: dict[int, str]  # the text of every id above

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        text = f"token {self.id}, {visible(self.piece)}: the rows e nearest to its own"
        for near in self.matrices:
            rows = number_table(
                ("by dot product", token_cells(self.words[id] for id in near.dot_ids)),
                ("e . e", near.dot),
                ("by cos", token_cells(self.words[id] for id in near.cos_ids)),
                ("cos", near.cos),
                ("by cos c", token_cells(self.words[id] for id in near.centred_cos_ids)),
                ("cos c", near.centred_cos),
            )
            text += f"\n\n{near.name} {near.does}\n{rows}"
        return f"{text}\n\nc is e minus the mean row, which no probability depends on"

    @override
    def figure(self) -> Figure:
        panels: list[Panel | Grid] = []
        for near in self.matrices:
            columns = {"cos": near.cos, "cos of the centred rows": near.centred_cos}
            names = [visible(self.words[id]) for id in near.centred_cos_ids.tolist()]
            curves = lines(columns)
            label = "neighbour, by the cosine of the centred rows"
            panels.append(Panel(near.name, label, curves, y_label="cosine", x_names=names))
        return f"rows nearest to token {self.id}, {visible(self.piece)}", panels


@torch.no_grad()
def neighbours(
    model: Model, tokenizer: Any = None, token: int | str = 0, *, top: int = 10
) -> Neighbours:
    """Return the rows nearest to a token's row, `top` by each measure.

    `model` and `tokenizer` are those of `positions`; `token` is an id or the text of one token.
    Raises `UserError` for a text of several tokens, an id out of range and a nonlinear head.
    """
    gpt, tokenizer = open_model(model, tokenizer, needed=isinstance(token, str))
    top = read_number("top", top, int, least=1)
    id = token_id(token, tokenizer, gpt.config.vocab_size, "token")
    with eval_mode(gpt):
        matrices = tuple(_nearest(matrix, id, top) for matrix in finite_vocab_matrices(gpt))
    named = [np.r_[id, near.dot_ids, near.cos_ids, near.centred_cos_ids] for near in matrices]
    words = {j: piece(tokenizer, j) for j in np.unique(named).tolist()}
    return Neighbours(id=id, piece=words[id], matrices=matrices, words=words)


def _nearest(matrix: VocabMatrix, id: int, top: int) -> NearestRows:
    """Return the nearest rows of a matrix (V, D)."""
    rows, columns = matrix.weight, dict[str, np.ndarray]()
    mean = rows.mean(0)

    def add(name: str, values: Tensor) -> None:
        values[id] = -torch.inf
        best = values.topk(min(top, len(values) - 1))
        columns[name], columns[f"{name}_ids"] = numpy(best.values), numpy(best.indices)

    add("dot", rows @ rows[id])
    add("cos", torch.cosine_similarity(rows, rows[id], dim=1))
    add("centred_cos", torch.cosine_similarity(rows - mean, rows[id] - mean, dim=1))
    return NearestRows(name=matrix.name, does=matrix.does, **columns)
