"""When a file holds two V x D matrices: the config's claim first, then what is really there.

Claims untied: both present, untied, even when equal; one present, an error that `resolve="tie"`
overrides. Claims tied, or nothing: one present, tied; both equal, tied, and said so; both
different, an error with numbers, and the choices. A missing matrix is never made up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiedgpt.errors import CorruptInputError, UserError

if TYPE_CHECKING:
    from tiedgpt.weights.checkpoint import LazyTensor

RESOLUTIONS = ("untie", "keep-input", "keep-output", "tie")
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Settled:
    """The matrix that reads; the head's own, or None when tied; what there is to tell."""

    embedding: LazyTensor | None
    head: LazyTensor | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """How far apart two matrices of one shape are."""

    largest: float
    cosine: float
    rows: int


def settle(
    path: Path,
    *,
    claim: bool | None,
    embedding: LazyTensor | None,
    head: LazyTensor | None,
    resolve: str | None,
) -> Settled:
    """Decide which matrix reads and which predicts; see the top of this file."""
    if resolve is not None and resolve not in RESOLUTIONS:
        raise UserError(f"resolve={resolve!r} is none of {', '.join(RESOLUTIONS)}")
    for name, matrix in (("wte.weight", embedding), ("lm_head.weight", head)):
        if matrix is not None and (len(matrix.shape) != 2 or not all(matrix.shape)):
            raise CorruptInputError(f"{path}: {name} of shape {matrix.shape} is no matrix (V, D)")
    if embedding is None or head is None:
        if resolve == "untie":
            raise UserError(f'{path} holds one matrix: resolve="untie" needs two; untie it later')
        if claim is False and resolve != "tie":
            lacking = "lm_head.weight" if head is None else "wte.weight"
            raise CorruptInputError(
                f"{path}: config.json says the head is not tied, and {lacking} is missing; "
                'resolve="tie" lets the one matrix do both'
            )
        return Settled(embedding if embedding is not None else head, None)
    if embedding.shape != head.shape:
        if claim is False or resolve == "untie":
            raise CorruptInputError(
                f"{path}: lm_head.weight {head.shape} is not of wte.weight's shape "
                f"{embedding.shape}: a token that is read could not be predicted"
            )
        raise CorruptInputError(
            f"{path}: tied matrices of two shapes, {embedding.shape} and {head.shape}"
        )
    if resolve == "keep-input":
        return Settled(embedding, None)
    if resolve == "keep-output":
        return Settled(head, None)
    if resolve == "tie":
        raise UserError(f'{path} holds two matrices: say which, "keep-input" or "keep-output"')
    if claim is False or resolve == "untie":
        return Settled(embedding, head)
    if embedding.stored.is_view_of(head.stored) and embedding.transposed == head.transposed:
        return Settled(embedding, None)
    apart = difference(embedding.read(), head.read())
    if apart.rows == 0:
        return Settled(embedding, None, ("wte.weight and lm_head.weight are equal: tied",))
    why = "should be one matrix" if claim else "are two, nothing says that the head is untied,"
    raise CorruptInputError(
        f"{path}: wte.weight and lm_head.weight {why} and differ in {apart.rows:,} of "
        f"{embedding.shape[0]:,} rows (largest difference {apart.largest:.3g}, cosine "
        f'{apart.cosine:.4f}); choose resolve="untie", "keep-input" or "keep-output" (--resolve)'
    )


def difference(a: Tensor, b: Tensor) -> Difference:
    """Compare two matrices (V, D), a block of rows at a time."""
    largest, rows = 0.0, 0
    dot = norm_a = norm_b = 0.0
    for x, y in zip(torch.split(a, BLOCK_ROWS), torch.split(b, BLOCK_ROWS), strict=True):
        rows += int((x != y).any(dim=1).sum())
        x, y = x.double(), y.double()
        largest = max(largest, float((x - y).abs().max()))
        dot += float((x * y).sum())
        norm_a += float(x.square().sum())
        norm_b += float(y.square().sum())
    length = float(torch.tensor(norm_a * norm_b).sqrt())
    return Difference(largest, dot / length if length else 0.0, rows)
