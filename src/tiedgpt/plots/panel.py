"""The elements of a figure: panels of lines, and grids; their limits and ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Line:
    """A curve: a value at each position of the axis."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    """Index of the color in the figure."""
    marked: bool = False
    """Whether each point has a marker."""
    joined: bool = True
    """Whether the points are connected; False draws a scatter plot."""
    low: Sequence[float] = ()
    """Lower ends of the shaded interval at each position; () for none."""
    high: Sequence[float] = ()
    """Upper ends."""

    def points(self) -> list[tuple[float, float]]:
        """Return the points whose value is finite."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if math.isfinite(y)]

    def shaded(self) -> list[tuple[float, float]]:
        """Return the finite ends of the intervals."""
        sides = (zip(self.xs, side, strict=True) for side in (self.low, self.high) if len(side))
        return [(x, y) for side in sides for x, y in side if math.isfinite(y)]


@dataclass(frozen=True)
class Panel:
    """Lines over one axis."""

    title: str
    x_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    most: float | None = None
    """Upper limit of the y axis; None: no limit."""
    y_label: str = ""
    x_names: Sequence[str] = ()
    """Labels of the positions 0, 1, ... of the axis, in a figure."""
    notes: Sequence[tuple[float, float, str]] = ()
    """Positions that a figure labels, as (x, y, label)."""
    x_limits: tuple[float, float] | None = None
    """Limits of the x axis; None: those of the lines."""

    def limits(self) -> tuple[float, float, float, float] | None:
        """Return the limits of x, then of y; None without any point."""
        points = [p for line in self.lines for p in (*line.points(), *line.shaded())]
        if not points:
            return None
        xs, ys = zip(*points, strict=True)
        top = max(ys) if self.most is None else max(min(ys), min(max(ys), self.most))
        return *_apart(*(self.x_limits or (min(xs), max(xs)))), *_apart(min(ys), top)


def share_x_axis(panels: Iterable[Panel]) -> list[Panel]:
    """Return the panels that have a point, with the same limits of x."""
    drawn = [panel for panel in panels if panel.limits() is not None]
    xs = [x for panel in drawn for line in panel.lines for x, _ in line.points()]
    return [replace(panel, x_limits=(min(xs), max(xs))) for panel in drawn]


@dataclass(frozen=True)
class Grid:
    """A number for each row and column, in colour; in a figure only."""

    title: str
    x_label: str
    y_label: str
    unit: str
    """Unit of the values, shown beside the colours."""
    values: Sequence[Sequence[float]]
    texts: Sequence[Sequence[str]] = ()
    """Text in each cell."""
    x_names: Sequence[str] = ()
    y_names: Sequence[str] = ()
    signed: bool = False
    """Whether 0 is the middle of the colours."""


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return limits that differ."""
    if high > low:
        return low, high
    room = abs(low) * 0.05 or 1.0
    return low - room, high + room


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Return the round numbers within the limits, as many as may be; at least one."""
    power = math.floor(math.log10((high - low) / max(1, at_most)))
    for step in (10.0**p * nice for p in (power, power + 1) for nice in (1, 2, 2.5, 5)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < at_most:
            return [k * step for k in range(first, last + 1)] or [low]
    return [low]


def label(value: float) -> str:
    """Return a tick as text: 0.0001, 2.5, 20k, 5M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.5g}{letter}"
    return f"{value:.5g}"


def smoothed(values: Sequence[float], share: float = 0.03) -> list[float]:
    """Return exponential means over about this share of the values, without a bias at the start.

    Values that are not finite do not change the mean.
    """
    keep = 1 - 1 / max(1.0, share * len(values))
    total = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if weight else math.nan)
    return means


def usual_most(lines: Iterable[Line], share: float = 0.97) -> float | None:
    """Return a height above this share of each line's points; None without any point."""
    tops = []
    for line in lines:
        if values := sorted(y for _, y in line.points()):
            tops.append(values[math.ceil(share * len(values)) - 1])
    return max(tops, default=None)
