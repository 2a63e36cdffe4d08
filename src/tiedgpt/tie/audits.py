"""Audit the tie: compare the matrix that predicts with the matrix that reads.

Names, shapes and places of all tensors come first. Numbers are read only if two matrices are
stored apart, a block of rows at a time. The verdict is the kind of `decide_tie` (weights): the
claim compared with the matrices. Exit code 6 is for "broken" and "contradicts the claim".
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import EXIT_OK, CheckFailedError, CorruptInputError, UserError
from tiedgpt.runtime import to_json_data
from tiedgpt.tie.findings import Finding, list_findings
from tiedgpt.weights.comparison import Comparison
from tiedgpt.weights.decision import SOUND, Kind, TieDecision
from tiedgpt.weights.gpt import check_gpt
from tiedgpt.weights.source import Source

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Matrix:
    """A V x D matrix, all its names, and its roles."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    """`reads`, `predicts`, or both."""
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True, repr=False)
class Audit:
    """The matrices of a model or checkpoint, the claim about them, and the verdict."""

    source: str
    format: str
    verdict: Kind
    claim: bool | None
    claim_source: str
    matrices: tuple[Matrix, ...]
    comparison: Comparison | None
    """None if there is one matrix, or if the two cannot be compared."""
    transposed: tuple[str, ...]
    """Names of matrices that are stored as (D, V)."""
    wasted_bytes: int
    load_error: str | None
    """Why a file that claims to be a GPT does not load, although its tie is as claimed."""
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 if the tie is as claimed and the file loads, else 6."""
        is_sound = self.verdict in SOUND and self.load_error is None
        return EXIT_OK if is_sound else CheckFailedError.exit_code

    @property
    def explain(self) -> str:
        """The text of all findings, a paragraph each."""
        return "\n\n".join(f"{f.title}\n{f.explain}" for f in self.findings)

    def __str__(self) -> str:
        return f"{self.source}: {self.verdict}\n\n{self.explain}"

    __repr__ = __str__

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return to_json_data(self) | {"exit_code": self.exit_code}


def audit(
    source: str | os.PathLike[str] | nn.Module,
    *,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Audit:
    """Return whether the head is the embedding, in a module or in any checkpoint.

    `input_name` and `output_name` name the matrices if their own names do not tell. Raises
    `CorruptInputError` for a file that cannot be read, `UserError` unless there is exactly
    one candidate.
    """
    opened = open_source(source)
    return examine(opened, opened.decide(input_name=input_name, output_name=output_name))


def open_source(source: str | os.PathLike[str] | nn.Module) -> Source:
    """Return the source of a path or of any module; torch is imported only if it is needed."""
    if isinstance(source, (str, os.PathLike)):
        return Source.of(source)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        raise UserError(f"{type(source).__name__} is neither a torch.nn.Module nor a path")
    from tiedgpt.tie.modules import open_module

    return Source(source, opened=open_module(source))


def examine(source: Source, decision: TieDecision) -> Audit:
    """Return the audit of a source from its tie decision; see `audit`."""
    checkpoint, roles = decision.checkpoint, decision.roles
    only_reads = decision.kind == "no head" or checkpoint.usage.head_computation or roles.unreadable
    names = (roles.matrix.name, *(tensor.name for tensor in roles.aliases))
    does: tuple[str, ...] = ("reads",) if only_reads else ("reads", "predicts")
    matrices = [(roles.matrix, names, does)]
    if roles.pair is not None and not roles.is_shared:
        reads, head = roles.pair
        matrices = [(reads, names, ("reads",)), (head, (head.name,), ("predicts",))]
    load_error = _find_load_error(source, decision) if decision.is_sound else None
    return Audit(
        source=str(checkpoint.source),
        format=checkpoint.container,
        verdict=decision.kind,
        claim=decision.checkpoint.claim.is_tied,
        claim_source=decision.checkpoint.claim.source,
        matrices=tuple(Matrix(n, d, t.shape, t.dtype, t.n_bytes) for t, n, d in matrices),
        comparison=roles.comparison,
        transposed=roles.transposed,
        wasted_bytes=roles.output.n_bytes if roles.output is not None and roles.is_equal else 0,
        load_error=load_error,
        findings=list_findings(decision, load_error),
    )


def _find_load_error(source: Source, decision: TieDecision) -> str | None:
    """Return the error of loading a file that claims to be a GPT and whose tie is sound.

    Returns None for files of other architectures, and for files that load once the caller adds
    missing fields, such as `n_head`.
    """
    checkpoint, format = source.checkpoint, source.checkpoint.format
    if checkpoint.in_memory or format is None or not format.detect_checkpoint(checkpoint):
        return None
    try:
        gpt = source.gpt
        has_heads = "n_head" in {**gpt.assumed, **gpt.fields}
        check_gpt(checkpoint, gpt, decision.choose(), {} if has_heads else {"n_head": 1})
    except CorruptInputError as error:
        return error.problem()
    except UserError:
        return None
    return None
