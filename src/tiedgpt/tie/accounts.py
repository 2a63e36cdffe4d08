"""The ledger: every parameter once, by the storage that it lies in and not by its names.

    before = ledger(model)
    model.lm_head = nn.Linear(768, 50257, bias=False)
    print(before.difference(ledger(model)).explain)

A row is one storage with all the names that share it. `multiply_adds` are those that a token costs:
a matrix that multiplies costs one for each element, a lookup none; the shared matrix is counted for
the product that it does as the head.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import TiedGPTError
from tiedgpt.tie.candidates import MAY_READ, READS, Roles, find_roles, is_position, role_word
from tiedgpt.tie.explanations import megabytes, size
from tiedgpt.tie.movements import Movement, compare_ledgers
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import FLOATS, StoredTensor, by_storage

if TYPE_CHECKING:
    from torch import nn

BUFFERS = re.compile(
    r"(^|[./])(attn|attention)\.(masked_)?bias$|inv_freq$|(^|\.)position_ids$|tril$|causal_mask$"
)
"""Masks and tables that some files hold beside the parameters."""
STATISTICS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|final_logits_bias)$")
"""What a module keeps and no optimizer trains."""
NOT_PARAMETERS = frozenset("int64 int32 uint32 uint64 bool".split())


@dataclass(frozen=True)
class Row:
    """One storage: all names of it, and its parameters counted once."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    parameters: int
    trainable: bool
    """Of a file: whether its type is one that is trained."""
    padded_rows: int
    """Rows beyond the vocabulary that the config tells; 0 where nothing is known."""
    multiply_adds: int
    """What a token costs in products with this matrix."""
    overlapping: bool = False
    """Whether the names are views of different parts of the storage, not one matrix."""

    @property
    def shared(self) -> bool:
        """Whether the storage has more than one name."""
        return len(self.names) > 1


@dataclass(frozen=True)
class Ledger:
    """All parameters of a model or a checkpoint, each storage once."""

    source: str
    format: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    """Tensors that are no parameters: masks, index tables, constants of a graph."""
    reads_and_predicts: str | None = None
    """Name of the matrix that does both without a second name; None where there is none."""

    @property
    def total(self) -> int:
        """The number of parameters, each counted once."""
        return sum(row.parameters for row in self.rows)

    @property
    def trainable(self) -> int:
        """How many of them are trained."""
        return sum(row.parameters for row in self.rows if row.trainable)

    @property
    def bytes(self) -> int:
        """The bytes they take, each storage once."""
        return sum(row.bytes for row in self.rows)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds a token in products with parameters; attention's own are not in it."""
        return sum(row.multiply_adds for row in self.rows)

    @property
    def explain(self) -> str:
        """The count in plain words: what is shared, by whom, and what a sum by names would say."""
        text = (
            f"{self.total:,} parameters in {len(self.rows):,} storages, {megabytes(self.bytes)}; "
            f"{self.multiply_adds:,} multiply-adds a token."
        )
        for row in self.rows:
            if self.reads_and_predicts in row.names:
                text += (
                    f" {self.reads_and_predicts} reads and predicts: one matrix of "
                    f"{size(row.shape)}, {row.parameters:,} parameters counted once; reading a "
                    "token looks up a row, predicting one is the product that is counted."
                )
            if row.overlapping:
                text += (
                    f" {' and '.join(row.names)} are different views of one storage: "
                    f"{row.parameters:,} parameters, what they have in common counted once."
                )
            elif row.shared:
                text += (
                    f" {' and '.join(row.names)} are one matrix of {size(row.shape)}: "
                    f"{row.parameters:,} parameters, counted once; a sum over names would count "
                    f"them {len(row.names)} times."
                )
        return text

    def __str__(self) -> str:
        return self.explain

    def difference(self, after: Ledger) -> Movement:
        """Say what came in and what went out between this ledger and a later one, and why."""
        return compare_ledgers(self, after)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        totals = ("total", "trainable", "bytes", "multiply_adds", "explain", "source", "format")
        return {
            **{name: getattr(self, name) for name in totals},
            "rows": [
                {**vars(row), "names": list(row.names), "shape": list(row.shape)}
                for row in self.rows
            ],
            "left_out": list(self.left_out),
        }


def ledger(source: str | os.PathLike[str] | nn.Module) -> Ledger:
    """Count a module's parameters, or a checkpoint's without building the model.

    Works on any `torch.nn.Module`. Raises `CorruptInputError` for a file that cannot be read.
    """
    from tiedgpt.tie.auditing import checkpoint_of

    checkpoint = checkpoint_of(source)
    if isinstance(source, (str, os.PathLike)):
        return _account(checkpoint, _costs(checkpoint))
    from tiedgpt.tie.module_tensors import multiply_adds

    return _account(checkpoint, multiply_adds(source))


def _account(checkpoint: Checkpoint, costs: Mapping[str, int]) -> Ledger:
    counted = [t for t in checkpoint.tensors.values() if _is_parameter(checkpoint, t)]
    names = {tensor.name for tensor in counted}
    roles = _roles(checkpoint)
    vocabulary = checkpoint.vocabulary
    tables = {tensor.name for tensor in (roles.input, roles.output) if tensor is not None}
    live = checkpoint.format == "module"
    groups = by_storage(counted)
    rows = tuple(_row(group, costs, tables, vocabulary, live=live) for group in groups)
    alone = roles.input.name if roles.input is not None and roles.output is None else None
    both = (row for row in rows if alone in row.names and row.multiply_adds and not row.shared)
    return Ledger(
        str(checkpoint.source),
        checkpoint.format,
        rows,
        tuple(name for name in checkpoint.tensors if name not in names),
        alone if any(both) else None,
    )


def _row(
    group: list[StoredTensor],
    costs: Mapping[str, int],
    tables: set[str],
    vocabulary: int | None,
    *,
    live: bool,
) -> Row:
    largest = max(group, key=lambda tensor: tensor.count)
    n_bytes, count = _extent(group, largest)
    padded = 0
    if vocabulary is not None and any(tensor.name in tables for tensor in group):
        padded = max(0, largest.shape[0] - vocabulary)
    return Row(
        names=tuple(tensor.name for tensor in group),
        shape=largest.shape,
        dtype=largest.dtype,
        bytes=n_bytes,
        parameters=count,
        trainable=any(tensor.trainable and (live or tensor.dtype in FLOATS) for tensor in group),
        padded_rows=padded,
        multiply_adds=sum(costs.get(tensor.name, 0) for tensor in group),
        overlapping=not all(tensor.is_view_of(largest) for tensor in group),
    )


def _extent(group: list[StoredTensor], largest: StoredTensor) -> tuple[int, int]:
    """Return the bytes and elements of a group, what several views cover counted once."""
    spans = {(tensor.storage.start, tensor.storage.stop) for tensor in group}
    if len(spans) == 1 or largest.dtype not in FLOATS:
        return largest.n_bytes, largest.count
    covered = max(stop for _, stop in spans) - min(start for start, _ in spans)
    distinct = {(t.storage.start, t.storage.stop): t for t in group}.values()
    n_bytes = min(covered, sum(tensor.n_bytes for tensor in distinct))
    return n_bytes, n_bytes // FLOATS[largest.dtype]


def _is_parameter(checkpoint: Checkpoint, tensor: StoredTensor) -> bool:
    if checkpoint.format == "module":
        return True
    if STATISTICS.search(tensor.name):
        return False
    if BUFFERS.search(tensor.name) and len(tensor.shape) != 1:
        return False
    if checkpoint.format == "ONNX" and (tensor.count < 2 or not tensor.shape):
        return False
    return tensor.dtype not in NOT_PARAMETERS


def _roles(checkpoint: Checkpoint) -> Roles:
    """Return which tensors read and predict, as far as names and shapes tell."""
    try:
        return find_roles(checkpoint)
    except TiedGPTError:
        return Roles(None, None)


def _costs(checkpoint: Checkpoint) -> dict[str, int]:
    """Return each tensor's multiply-adds a token, by what its name and shape say that it does."""
    if checkpoint.products is not None:
        return {name: checkpoint.tensors[name].count for name in checkpoint.products}
    costs = {
        tensor.name: tensor.count if len(tensor.shape) >= 2 and not _is_lookup(tensor.name) else 0
        for tensor in checkpoint.tensors.values()
    }
    roles = _roles(checkpoint)
    for matrix in (roles.input, *roles.others):
        if matrix is not None:
            costs[matrix.name] = 0
    head = roles.output
    if head is None and not roles.hidden and not checkpoint.headless:
        head = roles.input  # tied: it does the product
    if head is not None:
        costs[head.name] = head.count
    return costs


def _is_lookup(name: str) -> bool:
    return is_position(name) or role_word(name, READS, MAY_READ) == 2
