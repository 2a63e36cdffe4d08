"""What a figure is made of: panels with lines in them, their limits and their ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A curve: a value at each place of the axis."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    """Which of the figure's colours; 0 is the first."""
    marked: bool = False
    """Few points, worth a mark each."""

    def points(self, *, log_x: bool = False) -> list[tuple[float, float]]:
        """Return what can be drawn: finite points, on a logarithmic axis the positive ones."""
        pairs = zip(self.xs, self.ys, strict=True)
        return [
            (math.log10(x) if log_x else x, y)
            for x, y in pairs
            if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)
        ]


@dataclass(frozen=True)
class Panel:
    """Lines over one axis."""

    title: str
    x_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    most: float | None = None
    """What lies above is cut off; None: nothing does."""

    def limits(self) -> tuple[float, float, float, float] | None:
        """Return the least and greatest x (its log10 on a logarithmic axis), and y.

        None where there is nothing to draw.
        """
        points = [point for line in self.lines for point in line.points(log_x=self.log_x)]
        if not points:
            return None
        xs, ys = zip(*points, strict=True)
        x_low, x_high = _apart(min(xs), max(xs))
        top = max(ys) if self.most is None else max(min(ys), min(max(ys), self.most))
        return x_low, x_high, *_apart(min(ys), top)


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


def labels(values: Sequence[float]) -> list[str]:
    """Return ticks as text, all with as many decimals as tell them apart."""
    largest = max(map(abs, values), default=0.0)
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= limit:
            small = [value / unit for value in values]
            return [_plain(small, k) + letter if small[k] else "0" for k in range(len(small))]
    if 0 < largest < 1e-3:
        return [f"{value:.2g}" for value in values]
    return [_plain(values, k) for k in range(len(values))]


def _plain(values: Sequence[float], index: int) -> str:
    for decimals in range(7):
        texts = [f"{value:.{decimals}f}" for value in values]
        close = all(
            math.isclose(float(t), v, rel_tol=1e-6, abs_tol=1e-9)
            for t, v in zip(texts, values, strict=True)
        )
        if close:
            break
    return texts[index]


def smoothed(values: Sequence[float], share: float = 0.03) -> list[float]:
    """Return exponential means over about this share of the values, without a bias at the start.

    Values that are not finite leave the mean as it is.
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
    """Return a height below which this share of each line's points lies: what begins high is cut.

    None without any point.
    """
    tops = []
    for line in lines:
        values = sorted(y for _, y in line.points())
        if values:
            tops.append(values[min(len(values) - 1, math.ceil(share * len(values)) - 1)])
    return max(tops, default=None)
