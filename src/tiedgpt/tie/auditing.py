"""Is the matrix that predicts the matrix that reads? Of a model in memory or any checkpoint.

The names, shapes and places of all tensors come first; numbers are read only where two matrices
are stored apart, a block of rows at a time. What is claimed is held against what is there:

    verdict               there is                                       claimed          exit
    tied                  one matrix                                     tied or nothing  0
    tied twice            two equal copies in a file                     tied or nothing  0
    untied as claimed     two matrices, equal or not                     untied           0
    broken                two that differ, or do not fit; in memory,     tied or nothing  6
                          two Parameters where one is meant
    contradicts the claim one matrix                                     untied           6
    no head               a body or a classifier: it predicts no tokens  anything         0

A head that lies transposed in a safetensors or torch file, where no loader takes it, is broken
whatever is claimed. A GGUF file claims by holding an output.weight that it has a head of its own.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.errors import EXIT_OK, CheckFailedError, UserError
from tiedgpt.tie import explanations as words
from tiedgpt.tie.candidates import ONE_LAYOUT, Roles, find_roles
from tiedgpt.tie.explanations import Finding
from tiedgpt.tie.findings import Layout, collect, have_two_owners, is_one, is_turned
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import Comparison, compare
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.tensors import StoredTensor, printable

if TYPE_CHECKING:
    from torch import nn

Verdict = Literal[
    "tied", "tied twice", "untied as claimed", "broken", "contradicts the claim", "no head"
]
SOUND = ("tied", "tied twice", "untied as claimed", "no head")


@dataclass(frozen=True)
class Matrix:
    """A V x D matrix that was found, under all its names, and what it does."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    """`reads`, `predicts`, or both."""
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True)
class Audit:
    """What was found of the tie, what is claimed, and the verdict."""

    source: str
    format: str
    verdict: Verdict
    claim: bool | None
    claim_source: str
    matrices: tuple[Matrix, ...]
    comparison: Comparison | None
    """None where there is one matrix, or the two cannot be compared."""
    transposed: bool
    wasted_bytes: int
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 where the tie is as claimed, 6 where it is broken or contradicts the claim."""
        return EXIT_OK if self.verdict in SOUND else CheckFailedError.exit_code

    @property
    def explain(self) -> str:
        """All findings in plain words, a paragraph each."""
        return "\n\n".join(f"{f.title}\n{f.explain}" for f in self.findings)

    def __str__(self) -> str:
        return f"{self.source}: {self.verdict}\n\n{self.explain}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        c = self.comparison
        return {
            "source": self.source,
            "format": self.format,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "claim": self.claim,
            "claim_source": self.claim_source,
            "matrices": [
                {key: words.plain(value) for key, value in vars(matrix).items()}
                for matrix in self.matrices
            ],
            "transposed": self.transposed,
            "comparison": c and {key: words.plain(value) for key, value in vars(c).items()},
            "wasted_bytes": self.wasted_bytes,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def audit(
    source: str | os.PathLike[str] | nn.Module,
    *,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Audit:
    """Say whether the head is the embedding, in a module or in any checkpoint.

    `input_name` and `output_name` name the tensors where names do not tell. Raises
    `CorruptInputError` for a file that cannot be read, `UserError` where there is no embedding or
    there are several candidates.
    """
    return examine(checkpoint_of(source), input_name=input_name, output_name=output_name)


def checkpoint_of(source: str | os.PathLike[str] | nn.Module) -> Checkpoint:
    """Return the tensors of a module or a checkpoint; of files, without torch where it can be."""
    if isinstance(source, (str, os.PathLike)):
        return open_checkpoint(source)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        raise UserError(f"{type(source).__name__} is neither a torch.nn.Module nor a path")
    from tiedgpt.tie.module_tensors import module_checkpoint

    return module_checkpoint(source)


def examine(
    checkpoint: Checkpoint, *, input_name: str | None = None, output_name: str | None = None
) -> Audit:
    """Judge a checkpoint; see `audit`."""
    roles = find_roles(checkpoint, input_name=input_name, output_name=output_name)
    reads, predicts = roles.input, roles.output
    apart = reads is not None and predicts is not None and not is_one(reads, predicts)
    layout = Layout(reads, predicts) if reads and predicts else None
    comparison = None
    if apart and reads and predicts and layout and layout.fits:
        comparison, layout = _compare(reads, predicts, layout)
    verdict = _verdict(checkpoint, roles, layout, comparison)
    sound = verdict in SOUND
    findings = collect(checkpoint, roles, layout, comparison, verdict, sound=sound)
    duplicate = predicts is not None and comparison is not None and comparison.equal
    return Audit(
        source=str(checkpoint.source),
        format=checkpoint.format,
        verdict=verdict,
        claim=checkpoint.claim,
        claim_source=checkpoint.claim_source,
        matrices=_matrices(roles),
        comparison=comparison,
        transposed=layout is not None and layout.transposed,
        wasted_bytes=predicts.n_bytes if predicts and duplicate else 0,
        findings=tuple(
            replace(found, title=printable(found.title), explain=printable(found.explain))
            for found in findings
        ),
    )


def _compare(
    reads: StoredTensor, predicts: StoredTensor, layout: Layout
) -> tuple[Comparison | None, Layout]:
    """Compare; a square pair that differs straight may be equal across."""
    straight = compare(reads, predicts, transposed=layout.transposed)
    square = reads.shape == predicts.shape == reads.shape[::-1]
    if square and straight is not None and not straight.equal:
        across = compare(reads, predicts, transposed=True)
        if across is not None and across.equal:
            return across, Layout(reads, predicts, transposed=True)
    return straight, layout


def _verdict(
    checkpoint: Checkpoint, roles: Roles, layout: Layout | None, comparison: Comparison | None
) -> Verdict:
    reads, predicts, claim = roles.input, roles.output, checkpoint.claim
    live = checkpoint.format == "module"
    misplaced = layout is not None and layout.transposed and checkpoint.format in ONE_LAYOUT
    if checkpoint.derived:
        return "untied as claimed" if claim is False else "broken"
    misplaced = misplaced or (reads is not None and is_turned(checkpoint, reads))
    if reads is None or predicts is None:
        if roles.hidden:
            return "untied as claimed" if claim is False else "broken"
        if misplaced:
            return "broken"
        if checkpoint.headless:
            return "no head"
        return "tied" if claim is not False else "contradicts the claim"
    if is_one(reads, predicts):
        if claim is False:
            return "contradicts the claim"
        return "broken" if misplaced or have_two_owners(reads, predicts) else "tied"
    if layout is None or not layout.fits or misplaced:
        return "broken"
    if claim is False:
        return "untied as claimed"
    equal = comparison is not None and comparison.equal and layout.extra == 0
    if equal:
        return "broken" if live and (reads.trainable or predicts.trainable) else "tied twice"
    if checkpoint.format == "GGUF" and claim is None:
        return "untied as claimed"
    return "broken"


def _matrices(roles: Roles) -> tuple[Matrix, ...]:
    reads, predicts = roles.input, roles.output
    if reads is None or predicts is None or is_one(reads, predicts):
        found = reads or predicts
        assert found is not None
        names = [found.name, *(tensor.name for tensor in roles.others)]
        both = ("reads", "predicts")
        return (Matrix(tuple(names), both, found.shape, found.dtype, found.n_bytes),)
    names = [reads.name, *(tensor.name for tensor in roles.others)]
    return (
        Matrix(tuple(names), ("reads",), reads.shape, reads.dtype, reads.n_bytes),
        Matrix((predicts.name,), ("predicts",), predicts.shape, predicts.dtype, predicts.n_bytes),
    )
