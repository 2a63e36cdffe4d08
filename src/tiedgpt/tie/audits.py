"""Is the matrix that predicts the matrix that reads? Of a model in memory or of any checkpoint.

Names, shapes and places of all tensors come first. Numbers are read only if two matrices are
stored apart, a block of rows at a time. The claim is then held against what is there:

    verdict               there is                                       claimed          exit
    tied                  one matrix                                     tied or nothing  0
    tied twice            two equal copies in a file                     tied or nothing  0
    untied as claimed     two matrices, equal or not                     untied           0
                          two that differ, in a module without a config  nothing          0
    no head               a body or a classifier: it predicts no tokens  anything         0
    broken                two that differ, or do not fit; in memory,     tied or nothing  6
                          two Parameters where one is meant
    contradicts the claim one matrix                                     untied           6

A head stored transposed in a safetensors or torch file, which no loader takes, is broken whatever
is claimed. An output.weight in a GGUF file claims an untied head.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.errors import EXIT_OK, CheckFailedError, UserError
from tiedgpt.tie.findings import SOUND, Finding, findings, plain
from tiedgpt.tie.roles import ONE_LAYOUT, Roles, find_roles
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import Comparison, compare
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.tensors import StoredTensor

if TYPE_CHECKING:
    from torch import nn

Verdict = Literal[
    "tied", "tied twice", "untied as claimed", "broken", "contradicts the claim", "no head"
]


@dataclass(frozen=True)
class Matrix:
    """A V x D matrix under all its names, and what it does."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    """`reads`, `predicts`, or both."""
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True)
class Audit:
    """The matrices of a model or checkpoint, what is claimed of them, and the verdict."""

    source: str
    format: str
    verdict: Verdict
    claim: bool | None
    claim_source: str
    matrices: tuple[Matrix, ...]
    comparison: Comparison | None
    """None if there is one matrix, or if the two cannot be compared."""
    transposed: tuple[str, ...]
    """Names of matrices that are stored as (D, V)."""
    wasted_bytes: int
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 if the tie is as claimed, 6 if it is broken or contradicts the claim."""
        return EXIT_OK if self.verdict in SOUND else CheckFailedError.exit_code

    @property
    def explain(self) -> str:
        """All findings in plain words, a paragraph each."""
        return "\n\n".join(f"{f.title}\n{f.explain}" for f in self.findings)

    def __str__(self) -> str:
        return f"{self.source}: {self.verdict}\n\n{self.explain}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return plain(asdict(self) | {"exit_code": self.exit_code})


def audit(
    source: str | os.PathLike[str] | nn.Module,
    *,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Audit:
    """Say whether the head is the embedding, in a module or in any checkpoint.

    `input_name` and `output_name` name the matrices where their names do not tell. Raises
    `CorruptInputError` for a file that cannot be read, `UserError` if there is no embedding or
    there are several candidates.
    """
    checkpoint = checkpoint_of(source)
    roles = find_roles(checkpoint, input_name=input_name, output_name=output_name)
    return examine(checkpoint, roles)


def checkpoint_of(source: str | os.PathLike[str] | nn.Module) -> Checkpoint:
    """Return the tensors of a module or a checkpoint; torch is imported only if it is needed."""
    if isinstance(source, (str, os.PathLike)):
        return open_checkpoint(source)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        raise UserError(f"{type(source).__name__} is neither a torch.nn.Module nor a path")
    from tiedgpt.tie.modules import module_checkpoint

    return module_checkpoint(source)


def examine(checkpoint: Checkpoint, roles: Roles) -> Audit:
    """Compare the two matrices where there are two, and judge; see `audit`."""
    comparison = compare(*roles.pair) if roles.pair and roles.fits and not roles.shared else None
    equal = comparison is not None and comparison.equal
    verdict = _verdict(checkpoint, roles, equal)
    return Audit(
        source=str(checkpoint.source),
        format=checkpoint.format,
        verdict=verdict,
        claim=checkpoint.claim,
        claim_source=checkpoint.claim_source,
        matrices=_matrices(checkpoint, roles, verdict),
        comparison=comparison,
        transposed=roles.transposed,
        wasted_bytes=roles.output.n_bytes if roles.output is not None and equal else 0,
        findings=tuple(findings(checkpoint, roles, comparison, verdict)),
    )


def _verdict(checkpoint: Checkpoint, roles: Roles, equal: bool) -> Verdict:
    """Hold the claim against what is there; see the table at the top of this file."""
    claim = checkpoint.claim
    if checkpoint.derived or roles.unreadable:
        return "untied as claimed" if claim is False else "broken"
    if roles.transposed and checkpoint.format in ONE_LAYOUT:
        return "broken"
    if roles.pair is None and checkpoint.headless:
        return "no head"
    if roles.pair is None or roles.shared:
        if claim is False:
            return "contradicts the claim"
        return "broken" if roles.two_parameters else "tied"
    if claim is False:
        return "untied as claimed" if roles.fits else "broken"
    if equal and roles.extra_rows == 0:
        trained = any(matrix.trainable for matrix in roles.pair)
        return "broken" if checkpoint.format == "module" and trained else "tied twice"
    as_built = checkpoint.format == "module" and not checkpoint.config  # it may be no GPT
    as_built = (as_built or checkpoint.format == "GGUF") and claim is None and roles.fits
    return "untied as claimed" if as_built else "broken"


def _matrices(checkpoint: Checkpoint, roles: Roles, verdict: Verdict) -> tuple[Matrix, ...]:
    def matrix(tensor: StoredTensor, names: list[str], *does: str) -> Matrix:
        return Matrix(tuple(names), does, tensor.shape, tensor.dtype, tensor.n_bytes)

    names = [roles.matrix.name, *(tensor.name for tensor in roles.aliases)]
    if roles.pair is not None and not roles.shared:
        reads, head = roles.pair
        return matrix(reads, names, "reads"), matrix(head, [head.name], "predicts")
    only_reads = verdict == "no head" or checkpoint.derived or roles.unreadable
    return (matrix(roles.matrix, names, "reads", *(() if only_reads else ("predicts",))),)
