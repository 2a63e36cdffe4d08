"""The ledger counts every parameter once: by storage, not by name.

    before = ledger(model)
    model.lm_head = nn.Linear(768, 50257, bias=False)
    print(before.difference(ledger(model)).explain)

A row is one storage with all names that share it. `multiply_adds` are per token: a matrix that
multiplies costs one per element, a lookup none. A shared matrix counts as the output matrix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import TiedGPTError
from tiedgpt.files import format_bytes
from tiedgpt.runtime import to_json_data
from tiedgpt.tie.audits import open_source
from tiedgpt.tie.findings import format_shape
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.decision import TieDecision
from tiedgpt.weights.roles import POSITIONS, Roles, rank_name
from tiedgpt.weights.tensors import FLOATS, StoredTensor, by_storage

if TYPE_CHECKING:
    from torch import nn

STATISTICS = re.compile(
    r"(^|\.)(running_mean|running_var|num_batches_tracked|final_logits_bias|position_ids)$|inv_freq$"
)
"""Buffers of a module, which no optimizer trains."""
MASKS = re.compile(r"(^|[./])(attn|attention)\.(masked_)?bias$|tril$|causal_mask$")
"""Masks, unless they are vectors: c_attn's bias is one."""
NOT_PARAMETERS = ("int64", "int32", "uint32", "uint64", "bool")
PREFIXES = re.compile(r"^(_orig_mod\.)?(module\.)?(base_model\.model\.)?(transformer\.)?(model\.)?")
"""Prefixes that wrappers and libraries add to names."""


@dataclass(frozen=True)
class Row:
    """One storage: all its names, and its parameters counted once."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    parameters: int
    trainable: bool
    """Whether it requires a gradient; in a file, whether its type is a floating-point type."""
    multiply_adds: int
    """The cost of a token in products with this matrix."""

    @property
    def shared(self) -> bool:
        """Whether the storage has more than one name."""
        return len(self.names) > 1

    @property
    def keys(self) -> dict[str, str]:
        """The names without prefixes, to match rows of two ledgers, and the full name of each."""
        return {PREFIXES.sub("", name): name for name in self.names}


@dataclass(frozen=True, repr=False)
class Ledger:
    """All parameters of a model or a checkpoint, each storage once."""

    source: str
    format: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """Tensors that are not parameters: masks, index tables, constants of a graph."""
    reads_and_predicts: str | None
    """Name of the matrix that does both under one name, if there is one."""
    total: int
    """The number of parameters, each counted once."""
    trainable: int
    """The number of parameters that are trained."""
    bytes: int
    """The bytes of the parameters, each storage once."""
    multiply_adds: int
    """Multiply-adds per token in products with parameters; attention's own are not in it."""

    @property
    def explain(self) -> str:
        """The text of the count: shared storages, and the number that a count by names gives."""
        text = (
            f"{self.total:,} parameters in {len(self.rows):,} storages, "
            f"{format_bytes(self.bytes)}; {self.multiply_adds:,} multiply-adds per token."
        )
        for row in self.rows:
            names, shape = " and ".join(row.names), format_shape(row.shape)
            once = f"{row.parameters:,} parameters, counted once"
            if self.reads_and_predicts in row.names:
                text += f" {names} reads and predicts: one matrix of {shape}, {once}."
            elif row.shared:
                text += (
                    f" {names} share one storage of {shape}: {once}; a count by names would count "
                    f"it {len(row.names)} times."
                )
        return text

    def __str__(self) -> str:
        return f"{self.source}: {self.explain}"

    __repr__ = __str__

    def difference(self, after: Ledger) -> LedgerDifference:
        """Return the storages added and removed between this ledger and a later one, and why."""
        pairs = _match_rows(self.rows, after.rows)
        added_rows = tuple(row for row in after.rows if row not in pairs)
        paired = set(pairs.values())
        removed_rows = tuple(row for row in self.rows if row not in paired)
        reasons = [_explain_added(row, self.rows, after.rows) for row in added_rows]
        reasons += [_explain_removed(row, after.rows) for row in removed_rows]
        for new, old in pairs.items():
            if old.shape not in (new.shape, new.shape[::-1]):  # a transpose is only layout
                sizes = f"from {format_shape(old.shape)} to {format_shape(new.shape)}"
                more = new.parameters - old.parameters
                reasons.append(f"{new.names[0]} went {sizes}: {more:+,} parameters.")
        added = after.multiply_adds - self.multiply_adds
        return LedgerDifference(
            self.total, after.total, added, added_rows, removed_rows, tuple(reasons)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return to_json_data(self) | {"explain": self.explain}


@dataclass(frozen=True, repr=False)
class LedgerDifference:
    """The difference between two ledgers."""

    before: int
    """Parameters of the earlier ledger."""
    after: int
    """Parameters of the later ledger."""
    multiply_adds: int
    """Multiply-adds per token after, minus those before."""
    added_rows: tuple[Row, ...]
    """Storages of the later ledger that the earlier one does not have."""
    removed_rows: tuple[Row, ...]
    """Storages of the earlier ledger that the later one does not have."""
    reasons: tuple[str, ...]
    """Why, a sentence or two for each storage that changed."""

    @property
    def explain(self) -> str:
        """All of it in plain words."""
        if not self.reasons:
            return "Nothing came in and nothing went out: the same parameters."
        return f"{self.after - self.before:+,} parameters. " + " ".join(self.reasons)

    def __str__(self) -> str:
        counts = f"parameters: {self.before:,} -> {self.after:,}"
        return "\n  ".join([counts, *self.reasons])

    __repr__ = __str__


def ledger(source: str | os.PathLike[str] | nn.Module) -> Ledger:
    """Count a module's parameters, or a checkpoint's without building the model.

    Works on any `torch.nn.Module`. Raises `CorruptInputError` for a file that cannot be read.
    """
    opened = open_source(source)
    checkpoint = opened.checkpoint
    try:
        decision: TieDecision | None = opened.decide()
    except TiedGPTError:  # a ledger needs no embedding
        decision = None
    roles = Roles(None, None) if decision is None else decision.roles
    is_tied = decision is not None and decision.kind == "tied"
    costs = _count_costs(checkpoint, roles, is_tied)
    counted = [t for t in checkpoint.tensors.values() if _is_parameter(checkpoint, t)]
    rows = tuple(
        _count_row(group, costs, in_memory=checkpoint.in_memory) for group in by_storage(counted)
    )
    names = {tensor.name for tensor in counted}
    alone = roles.input.name if roles.input and not roles.output and is_tied else None
    multiplies = any(row.names == (alone,) and row.multiply_adds for row in rows)
    return Ledger(
        source=str(checkpoint.source),
        format=checkpoint.container,
        rows=rows,
        left_out=tuple(name for name in checkpoint.tensors if name not in names),
        reads_and_predicts=alone if multiplies else None,
        total=sum(row.parameters for row in rows),
        trainable=sum(row.parameters for row in rows if row.trainable),
        bytes=sum(row.bytes for row in rows),
        multiply_adds=sum(row.multiply_adds for row in rows),
    )


def _count_row(group: list[StoredTensor], costs: Mapping[str, int], *, in_memory: bool) -> Row:
    """Count the tensors of one storage once."""
    largest = max(group, key=lambda tensor: tensor.count)
    spans = {(t.storage.start, t.storage.stop): t.n_bytes for t in group}
    n_bytes = largest.n_bytes
    if len(spans) > 1:  # views of different parts
        covered = max(stop for _, stop in spans) - min(start for start, _ in spans)
        n_bytes = min(covered, sum(spans.values()))
    return Row(
        names=tuple(tensor.name for tensor in group),
        shape=largest.shape,
        dtype=largest.dtype,
        bytes=n_bytes,
        parameters=largest.count * n_bytes // max(1, largest.n_bytes),
        trainable=any(t.trainable and (in_memory or t.dtype in FLOATS) for t in group),
        multiply_adds=sum(costs.get(tensor.name, 0) for tensor in group),
    )


def _is_parameter(checkpoint: Checkpoint, tensor: StoredTensor) -> bool:
    if checkpoint.in_memory:
        return True
    if STATISTICS.search(tensor.name) or tensor.dtype in NOT_PARAMETERS:
        return False
    if MASKS.search(tensor.name) and len(tensor.shape) != 1:
        return False
    return not checkpoint.usage.is_of_graph or tensor.count > 1


def _count_costs(checkpoint: Checkpoint, roles: Roles, is_tied: bool) -> dict[str, int]:
    """Return each tensor's multiply-adds per token: by the graph, the module, or the names."""
    if checkpoint.usage.products is not None:
        return {name: checkpoint.tensors[name].count for name in checkpoint.usage.products}
    looked_up = {tensor.name for tensor in (roles.input, *roles.aliases) if tensor is not None}
    looked_up |= {*checkpoint.usage.reads}
    costs = {}
    for name, tensor in checkpoint.tensors.items():
        table = name in looked_up or POSITIONS.search(name) or rank_name(name, "input") == 2
        costs[name] = tensor.count if len(tensor.shape) >= 2 and not table else 0
    multiplying = {*checkpoint.usage.predicts}
    if roles.output is not None:
        multiplying.add(roles.output.name)
    elif roles.input and is_tied and not checkpoint.in_memory:
        multiplying.add(roles.input.name)
    return costs | {name: checkpoint.tensors[name].count for name in multiplying}


# What moved between two ledgers, and why


def _match_rows(before: tuple[Row, ...], after: tuple[Row, ...]) -> dict[Row, Row]:
    """Pair each later storage with the first that had one of its names, each of these once."""
    by_key = {key: row for row in reversed(before) for key in row.keys}
    pairs, unpaired = dict[Row, Row](), set(before)
    for new in after:
        old = next((by_key[key] for key in new.keys if by_key.get(key) in unpaired), None)
        if old is not None:
            pairs[new] = old
            unpaired.remove(old)
    return pairs


def _explain_added(row: Row, before: tuple[Row, ...], after: tuple[Row, ...]) -> str:
    brings = (
        f"{row.names[0]} ({format_shape(row.shape)}) came in with {row.parameters:,} parameters"
    )
    partner = _find_partner(row, before)
    if partner:
        return (
            f"{brings} of its own. It used to be the same storage as {partner}, and is now a "
            "second matrix beside it. From here on the two are trained apart. To share one again: "
            "tiedgpt.tie.tie(model)."
        )
    alike = [other.names[0] for other in after if other is not row and other.shape == row.shape]
    if alike and len(row.shape) == 2:
        brings += f", in the shape of {alike[0]} (if it predicts, the head is not tied)"
    return f"{brings}; nothing had that name before."


def _explain_removed(row: Row, after: tuple[Row, ...]) -> str:
    partner = _find_partner(row, after)
    why = "nothing has that name now"
    if partner:
        why = f"it is now the same storage as {partner}, counted once"
    name, shape = row.names[0], format_shape(row.shape)
    return f"{name} ({shape}) went out with {row.parameters:,} parameters: {why}."


def _find_partner(row: Row, others: tuple[Row, ...]) -> str:
    """Return a further name of the storage that had, or has, one of the row's names."""
    sharing = [other.keys for other in others if other.keys.keys() & row.keys]
    return next((keys[key] for keys in sharing for key in keys if key not in row.keys), "")
