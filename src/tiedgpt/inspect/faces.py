"""The matrix that reads and the matrix that predicts: their rows, whatever modules hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.inspect.distributions import wide
from tiedgpt.tie.heads import find_head_layers, is_tied, predicts_through_wte
from tiedgpt.weights.parameters import head_matrix


@dataclass(frozen=True)
class Face:
    """A matrix with a row for each token, and what the model does with it."""

    name: str
    """Of the parameter: "wte.weight"; of a module that computes its rows: "head"."""
    does: str
    """"reads", "predicts", or "reads and predicts"."""
    weight: Tensor
    """W (V, D), fp32 at least."""
    bias: Tensor
    """(V,) what the head adds to the logits: 0 for a plain one."""


@torch.no_grad()
def faces(model: GPT) -> tuple[Face, ...]:
    """Return one face of a tied model, of an untied one that which reads, then the other."""
    predicts = _predicting(model)
    if is_tied(model):
        return (predicts,)
    as_built = type(model.wte) is TiedEmbedding
    every = torch.arange(model.config.vocab_size, device=predicts.weight.device)
    weight = wide(model.wte.weight if as_built else model.wte(every)).detach()
    name = "wte.weight" if as_built else "wte"
    return Face(name, "reads", weight, torch.zeros_like(predicts.bias)), predicts


def finite_faces(model: GPT) -> tuple[Face, ...]:
    """Return `faces`; `UserError` where a row has a NaN or an infinity, and so no place."""
    for face in (found := faces(model)):
        if wrong := int((~torch.isfinite(face.weight).all(dim=1)).sum()):
            raise UserError(
                f"{face.name} holds nan or inf in {wrong:,} rows: nothing compares them"
            )
    return found


def _predicting(model: GPT) -> Face:
    """Return the matrix that predicts: logits = h W^T + bias.

    A head that computes its rows (an adapter, a factor) is asked for them: its answer to the unit
    vectors. Raises `UserError` for a head that is not linear.
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
        weight = wide(matrix).detach()
        return Face(f"{name}.weight", does, weight, weight.new_zeros(len(weight)))
    width, like = model.config.n_embd, next(model.parameters())
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    bias = model.logits(torch.zeros_like(units[:1]))[0]
    weight = torch.cat([model.logits(some) - bias for some in units.split(64)]).T.contiguous()
    h = torch.arange(width, device=like.device).sin().to(like)
    expected = model.logits(h[None])[0]
    if not (weight @ h + bias - expected).abs().max() < 1e-2 * expected.abs().max() + 1e-30:
        raise UserError(
            "the head is not linear (logits are not h W^T + bias), so no row of a matrix stands "
            "for a token: positions, lens, attention and ablate work with any head"
        )
    return Face(name, does, wide(weight), wide(bias))


def final_bias(model: GPT) -> Tensor:
    """Return the bias b (D,) of the norm before the head; zeros if it has none."""
    norm = model.h[-1].ln_2 if model.config.norm == "post" else model.ln_f
    bias = getattr(norm, "bias", None)
    return wide(torch.zeros_like(model.wpe.weight[0]) if bias is None else bias).detach()
