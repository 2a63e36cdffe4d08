"""Two ledgers compared: which parameters came in, which went out, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiedgpt.tie.explanations import size

if TYPE_CHECKING:
    from tiedgpt.tie.accounts import Ledger, Row

PREFIXES = ("_orig_mod.", "module.", "base_model.model.", "transformer.", "model.")


@dataclass(frozen=True)
class Movement:
    """What is different between two ledgers."""

    came_in: tuple[Row, ...]
    """Storages of the later ledger that are in no way in the earlier one."""
    went_out: tuple[Row, ...]
    """Storages of the earlier ledger that are gone from the later one."""
    total: int
    """Parameters after, less parameters before."""
    multiply_adds: int
    """Multiply-adds a token after, less before."""
    reasons: tuple[str, ...]
    """Why, a sentence for each storage that changed."""

    @property
    def explain(self) -> str:
        """All of it in plain words."""
        if not self.reasons:
            return "Nothing came in and nothing went out: the same parameters, shared the same way."
        return f"{self.total:+,} parameters. " + " ".join(self.reasons)

    def __str__(self) -> str:
        return self.explain

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "came_in": [{**vars(row), "names": list(row.names)} for row in self.came_in],
            "went_out": [{**vars(row), "names": list(row.names)} for row in self.went_out],
            "total": self.total,
            "multiply_adds": self.multiply_adds,
            "reasons": list(self.reasons),
        }


def compare_ledgers(before: Ledger, after: Ledger) -> Movement:
    """Match storages by their names; see `Ledger.difference`."""
    pairs, came_in, went_out = _match(before.rows, after.rows)
    reasons = [_why_in(row, before.rows, after.rows) for row in came_in]
    reasons += [_why_out(row, after.rows) for row in went_out]
    reasons += [reason for old, new in pairs if (reason := _why_other(old, new, after.rows))]
    return Movement(
        tuple(came_in),
        tuple(went_out),
        after.total - before.total,
        after.multiply_adds - before.multiply_adds,
        tuple(reasons),
    )


def _match(
    before: tuple[Row, ...], after: tuple[Row, ...]
) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """Pair each storage with the one that kept its first name, or else any of its names."""
    left = list(before)
    pairs: list[tuple[Row, Row]] = []
    rest = list(after)
    for n_names in (1, None):  # the first name decides before any other does
        by_key = {_key(name): row for row in reversed(left) for name in row.names[:n_names]}
        unmatched = []
        for new in rest:
            candidates = (by_key.get(_key(name)) for name in new.names[:n_names])
            old = next((row for row in candidates if row is not None), None)
            if old is not None and any(old is row for row in left):
                pairs.append((old, new))
                left = [row for row in left if row is not old]
            else:
                unmatched.append(new)
        rest = unmatched
    return pairs, rest, left


def _why_in(row: Row, before: tuple[Row, ...], after: tuple[Row, ...]) -> str:
    brings = f"{row.names[0]} ({size(row.shape)}) came in with {row.parameters:,} parameters"
    for old in before:
        if _keys(old) & _keys(row):
            partners = [name for name in old.names if _key(name) not in _keys(row)]
            if partners:
                stayed = _holder(partners[0], after)
                return (
                    f"{brings} of its own: it used to be the same storage as {partners[0]}, and is "
                    f"now a second matrix beside it{stayed}. The two are trained apart from here "
                    f"on. To share one again: tiedgpt.tie.tie(model)."
                )
    twins = [other.names[0] for other in after if other is not row and other.shape == row.shape]
    if len(row.shape) == 2 and twins and any(_key(t) in _all(before) for t in twins):
        return (
            f"{brings} of its own, in the shape of {twins[0]}; nothing of that name was there "
            "before. If it predicts, the head is not tied."
        )
    return f"{brings}; nothing of that name was there before."


def _holder(name: str, after: tuple[Row, ...]) -> str:
    for row in after:
        if _key(name) in _keys(row):
            return f", which keeps its {row.parameters:,}"
    return ""


def _why_out(row: Row, after: tuple[Row, ...]) -> str:
    loses = f"{row.names[0]} ({size(row.shape)}) went out with {row.parameters:,} parameters"
    for new in after:
        if _keys(new) & _keys(row):
            partners = [name for name in new.names if _key(name) not in _keys(row)]
            if partners:
                return f"{loses}: it is now the same storage as {partners[0]}, counted once."
    return f"{loses}: nothing of that name is left."


def _why_other(old: Row, new: Row, after: tuple[Row, ...]) -> str:
    if old.shape != new.shape and old.shape != new.shape[::-1]:  # a transpose is layout only
        return (
            f"{new.names[0]} went from {size(old.shape)} to {size(new.shape)}: "
            f"{new.parameters - old.parameters:+,} parameters."
        )
    if old.parameters != new.parameters:
        return f"{new.names[0]} holds {new.parameters - old.parameters:+,} parameters."
    lost = [name for name in old.names if _key(name) not in _all(after)]
    if lost:
        return f"{', '.join(lost)} no longer names the storage of {new.names[0]}; no count changes."
    return ""


def _key(name: str) -> str:
    """Return a name without what wrappers and libraries put before it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _keys(row: Row) -> set[str]:
    return {_key(name) for name in row.names}


def _all(rows: tuple[Row, ...]) -> set[str]:
    return {key for row in rows for key in _keys(row)}
