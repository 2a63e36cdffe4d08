"""Which matrix reads and which predicts when a file holds one V x D matrix, or two.

The claim (config.json's, or the format's) comes first. `resolve` overrides it:

    claim           the file holds       the model is                    resolve
    untied          two                  untied, even if they are equal  "keep-input", "keep-output"
    untied          one                  an error: one is missing        "tie"
    tied, or none   one                  tied
    tied, or none   two, equal           tied, with a note               "untie"
    tied, or none   two, different       an error with numbers           "untie", "keep-input",
                                                                         "keep-output"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.comparison import compare
from tiedgpt.weights.tensors import StoredTensor

RESOLUTIONS = ("untie", "keep-input", "keep-output", "tie")


@dataclass(frozen=True)
class Matrices:
    """The embedding, the head's own matrix (None if tied), and notes for the user."""

    embedding: StoredTensor | None
    head: StoredTensor | None
    notes: tuple[str, ...] = ()


def choose_matrices(
    path: Path,
    *,
    claim: bool | None,
    embedding: StoredTensor | None,
    head: StoredTensor | None,
    resolve: str | None,
) -> Matrices:
    """Return what the model is built from; see the table at the top of this file.

    Raises `CorruptInputError` where the file contradicts itself, `UserError` where `resolve` does
    not apply.
    """
    if resolve is not None and resolve not in RESOLUTIONS:
        raise UserError(f"resolve must be one of {', '.join(RESOLUTIONS)}, got {resolve!r}")
    for name, matrix in (("wte.weight", embedding), ("lm_head.weight", head)):
        if matrix is not None and (len(matrix.shape) != 2 or not all(matrix.shape)):
            raise CorruptInputError(f"{path}: {name} must be a matrix (V, D), got {matrix.shape}")
    if embedding is None or head is None:
        if resolve == "untie":
            raise UserError(f'{path} holds one matrix: resolve="untie" needs two; untie it later')
        if claim is False and resolve != "tie":
            raise CorruptInputError(
                f"{path} claims that the head is not tied, and "
                f"{'lm_head.weight' if head is None else 'wte.weight'} is missing; "
                'resolve="tie" lets the one matrix read and predict'
            )
        return Matrices(embedding or head, None)
    if embedding.shape != head.shape:
        untied = claim is False or resolve == "untie"
        raise CorruptInputError(
            f"{path}: wte.weight is {embedding.shape} and lm_head.weight is {head.shape}: "
            + ("both need a row for each token" if untied else "one matrix cannot have two shapes")
        )
    if resolve == "tie":
        raise UserError(f'{path} holds two matrices: choose "keep-input" or "keep-output"')
    if resolve in ("keep-input", "keep-output"):
        return Matrices(embedding if resolve == "keep-input" else head, None)
    if claim is False or resolve == "untie":
        return Matrices(embedding, head)
    if embedding.is_view_of(head):
        return Matrices(embedding, None)
    embedding.require_decodable()
    head.require_decodable()
    comparison = compare(embedding, head)
    if comparison is not None and comparison.equal:
        return Matrices(embedding, None, ("wte.weight and lm_head.weight are equal: tied",))
    why = "its config claims one matrix" if claim else "nothing says that the head is untied"
    raise CorruptInputError(
        f"{path} holds two matrices, and {why}: wte.weight and lm_head.weight "
        f"{comparison or 'cannot be compared'}; "
        'choose resolve="untie", "keep-input" or "keep-output" (--resolve)'
    )
