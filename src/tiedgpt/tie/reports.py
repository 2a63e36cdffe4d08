"""What an operation on the tie did, as plain data that prints as a few readable lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from torch import nn

from tiedgpt.tie.storages import count, storage_key
from tiedgpt.weights.comparison import Comparison

REMAKE_OPTIMIZER = (
    "an optimizer made before this holds the old parameters: make a new one before the next step"
)


@dataclass(frozen=True)
class Change:
    """Parameters of the whole model before and after, counted by storage."""

    parameters_before: int
    parameters_after: int
    came_in: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters that are new: their shapes by name."""
    went_out: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters that are gone: their shapes by their old names."""

    @classmethod
    def since(cls, before: dict[str, nn.Parameter], module: nn.Module) -> Change:
        """Compare the module with what `storages.named` said of it before."""
        old, now = dict(before), dict(module.named_parameters())
        old_keys = {storage_key(parameter) for parameter in old.values()}
        now_keys = {storage_key(parameter) for parameter in now.values()}
        return cls(
            parameters_before=count(old.values()),
            parameters_after=count(now.values()),
            came_in={n: tuple(p.shape) for n, p in now.items() if storage_key(p) not in old_keys},
            went_out={n: tuple(p.shape) for n, p in old.items() if storage_key(p) not in now_keys},
        )

    def lines(self) -> list[str]:
        """Return the change in words."""
        if self.parameters_before == self.parameters_after:
            text = [f"parameters: {self.parameters_before:,}, as before"]
        else:
            text = [f"parameters: {self.parameters_before:,} -> {self.parameters_after:,}"]
        for what, shapes in (("came in: ", self.came_in), ("went out:", self.went_out)):
            text += [f"  {what} {n} {shape}, {prod(shape):,}" for n, shape in shapes.items()]
        return text


@dataclass(frozen=True)
class TieReport:
    """Two matrices have become one."""

    input: str
    """Name of the matrix that reads; it is the one that is left."""
    outputs: tuple[str, ...]
    """Names under which the matrix that predicted stood."""
    shape: tuple[int, ...]
    """(V, D)."""
    keep: str
    """Whose values are left: `input`, `output` or `mean`."""
    apart: Comparison | None
    """How far the two were apart before; None on the meta device, where nothing has a value."""
    change: Change
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        outputs = ", ".join(self.outputs)
        kept = {"input": f"those of {self.input}", "output": f"those of {outputs}"}
        lines = [
            f"tied: one matrix {self.shape} reads and predicts, {self.input}; it took the place of "
            + outputs
        ]
        if self.apart is None:
            lines.append("the two were not compared: on the meta device they have no values")
        elif self.apart.equal:
            lines.append("the two were equal")
        else:
            kept_values = kept.get(self.keep, "the mean of both")
            lines.append(f"the two matrices {self.apart}; the values kept are {kept_values}")
        return "\n".join([*lines, *self.change.lines(), *self.notes])


@dataclass(frozen=True)
class HeadReport:
    """What predicts now."""

    head: str
    """The new head in a few words."""
    n_outputs: int
    """How many tokens it scores: V."""
    tied: bool
    """Whether W predicts."""
    change: Change
    how_to_tie: str = ""
    """What makes W predict again, where it does not."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = (
            "tied: wte.weight reads and predicts"
            if self.tied
            else "NOT tied: wte.weight only reads, the head predicts with a matrix of its own"
        )
        lines = [f"head: {self.head}, scores {self.n_outputs:,} tokens", state]
        lines += self.change.lines()
        return "\n".join([*lines, *([self.how_to_tie] if self.how_to_tie else []), *self.notes])


@dataclass(frozen=True)
class Mass:
    """The probability that new tokens take, at hidden states of this model."""

    mean: float
    """Mean over the states of the new rows' summed probability."""
    largest: float
    """Its largest value over the states."""
    share: float
    """What they would take if all tokens were equally likely: new rows / all rows."""
    n_states: int
    """How many hidden states were looked at."""
    spread: float
    """Standard deviation of the new rows about the mean row, in units of the old rows' own."""

    def __str__(self) -> str:
        return (
            f"probability of the new tokens at {self.n_states} states: {self.mean:.3g} on average, "
            f"{self.largest:.3g} at most (their share of the vocabulary is {self.share:.3g}); "
            f"drawn with {self.spread:.3g} of the old rows' spread about their mean"
        )


@dataclass(frozen=True)
class VocabularyReport:
    """The vocabulary has another size."""

    rows_before: int
    rows_after: int
    matrices: tuple[str, ...]
    """The parameters that have other rows now."""
    change: Change
    mass: Mass | None = None
    """None where no row was added, or the weights are on the meta device."""
    old_ids: tuple[int, ...] | None = None
    """After pruning: the old id of each new id."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.rows_before == self.rows_after and self.old_ids is None:
            return f"vocabulary: {self.rows_before:,} tokens, as before"
        lines = [
            f"vocabulary: {self.rows_before:,} -> {self.rows_after:,} tokens, in "
            + ", ".join(self.matrices),
            *self.change.lines(),
        ]
        lines += [] if self.mass is None else [str(self.mass)]
        return "\n".join([*lines, *self.notes])
