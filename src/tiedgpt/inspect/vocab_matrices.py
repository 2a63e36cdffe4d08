"""Matrices with a row for each token: the input embedding and the output head.

A tied model has one, an untied model two. An adapter or a factored layer computes its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import format_count
from tiedgpt.inspect.distributions import upcast
from tiedgpt.tie.heads import find_head_layers, is_tied, predicts_through_wte
from tiedgpt.weights.parameters import head_matrix


@dataclass(frozen=True)
class VocabMatrix:
    """A matrix of V rows, and its use in the model."""

    name: str
    """Name of the parameter ("wte.weight"), or of the module that computes the rows ("head")."""
    does: str
    """"reads", "predicts", or "reads and predicts"."""
    weight: Tensor
    """W (V, D), fp32 at least."""
    bias: Tensor
    """(V,) Bias that the head adds to the logits, zeros for most models."""


@torch.no_grad()
def vocab_matrices(model: GPT) -> tuple[VocabMatrix, ...]:
    """Return the matrix of a tied model, or the input and the output matrix of an untied one."""
    predicts = _predicting(model)
    if is_tied(model):
        return (predicts,)
    as_built = type(model.wte) is TiedEmbedding
    all_ids = torch.arange(model.config.vocab_size, device=predicts.weight.device)
    weight = upcast(model.wte.weight if as_built else model.wte(all_ids)).detach()
    name = "wte.weight" if as_built else "wte"
    return VocabMatrix(name, "reads", weight, torch.zeros_like(predicts.bias)), predicts


def finite_vocab_matrices(model: GPT) -> tuple[VocabMatrix, ...]:
    """Return `vocab_matrices`; raise `UserError` if a row holds a NaN or an infinity."""
    matrices = vocab_matrices(model)
    for matrix in matrices:
        if wrong := int((~torch.isfinite(matrix.weight).all(dim=1)).sum()):
            raise UserError(
                f"{matrix.name} holds nan or inf in {format_count(wrong, 'row')}: nothing compares "
                "them"
            )
    return matrices


def _predicting(model: GPT) -> VocabMatrix:
    """Return the matrix that predicts: logits = h W^T + bias.

    A head that computes its rows (an adapter, a factor) is applied to the unit vectors. Raises
    `UserError` for a head that is not linear.
    """
    name, matrix = next(iter(find_head_layers(model)), "head"), None
    if model.head is not None:
        matrix = head_matrix(model.head)
    elif type(model.wte) is TiedEmbedding:
        matrix = model.wte.weight
    if predicts_through_wte(model) or matrix is model.wte.weight:
        name = "wte"
    does = "reads and predicts" if is_tied(model) else "predicts"
    if matrix is not None:
        weight = upcast(matrix).detach()
        return VocabMatrix(f"{name}.weight", does, weight, weight.new_zeros(len(weight)))
    width, like = model.config.n_embd, next(model.parameters())
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    bias = model.logits(torch.zeros_like(units[:1]))[0]
    weight = torch.cat([model.logits(rows) - bias for rows in units.split(64)]).T.contiguous()
    h = torch.arange(width, device=like.device).sin().to(like)
    expected = model.logits(h[None])[0]
    if not (weight @ h + bias - expected).abs().max() < 1e-2 * expected.abs().max() + 1e-30:
        raise UserError(
            "the head is not linear (logits are not h W^T + bias), so no row of a matrix stands "
            "for a token: positions, lens, attention and ablate work with any head"
        )
    return VocabMatrix(name, does, upcast(weight), upcast(bias))


def final_bias(model: GPT) -> Tensor:
    """Return the bias b (D,) of the norm before the head, or zeros."""
    norm = model.h[-1].ln_2 if model.config.norm == "post" else model.ln_f
    bias = getattr(norm, "bias", None)
    return upcast(torch.zeros_like(model.wpe.weight[0]) if bias is None else bias).detach()
