"""A panel in a terminal: curves of braille dots, two by four in a character."""

from __future__ import annotations

import math
from itertools import pairwise

from rich.text import Text

from tiedgpt.plots.panel import Line, Panel, labels, ticks

COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
MARGIN = 9
"""Columns for the numbers at the left, with the axis."""


def draw(panel: Panel, *, width: int = 80, height: int = 14) -> Text:
    """Return the panel as text of `width` columns; `height` rows are the plot's own."""
    text = Text(no_wrap=True)
    text.append_text(_heading(panel, width))
    limits = panel.limits()
    if limits is None:
        return text.append("\n" + " " * MARGIN + "nothing to draw yet\n", "bright_black")
    x_low, x_high, y_low, y_high = limits
    columns, rows = max(10, width - MARGIN - 2), max(2, height)
    canvas = _Canvas(columns, rows, limits)
    for line in panel.lines:
        canvas.draw(line, log_x=panel.log_x)
    heights = ticks(y_low, y_high, max(2, rows // 2))
    at = [round((y_high - y) / (y_high - y_low) * (rows - 1)) for y in heights]
    named = dict(zip(at, labels(heights), strict=True))
    for row in range(rows):
        label = named.get(row)
        text.append(f"\n{label or '':>{MARGIN - 2}} " + ("┤" if label else "│"), "bright_black")
        text.append_text(canvas.row(row))
    text.append("\n" + _axis(panel, x_low, x_high, columns) + "\n", "bright_black")
    return text


def _heading(panel: Panel, width: int) -> Text:
    text = Text(f"{'':{MARGIN}}{panel.title}", "bold")
    drawn = [line for line in panel.lines if line.points(log_x=panel.log_x)]
    if len(drawn) < 2:
        return text
    for number, line in enumerate(panel.lines, start=1):
        if line not in drawn:
            continue
        entry = f"  {number} {line.name}"
        if len(text.plain.rpartition("\n")[2]) + len(entry) > width:
            text.append("\n" + " " * (MARGIN - 2))
        text.append(entry, f"not bold {COLORS[line.color % len(COLORS)]}")
    return text


def _axis(panel: Panel, low: float, high: float, columns: int) -> str:
    """Return the axis below the plot, and its numbers."""
    if panel.log_x:
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        places = [float(power) for power in powers] or [low, high]
        names = [f"{10**place:.2g}" for place in places]
    else:
        places = ticks(low, high, max(2, columns // 9))
        names = labels(places)
    rule = ["─"] * columns
    below = [" "] * (columns + MARGIN + 2)
    for place, name in zip(places, names, strict=True):
        column = round((place - low) / (high - low) * (columns - 1))
        rule[column] = "┬"
        start = min(max(0, MARGIN + column - len(name) // 2), len(below) - len(name))
        below[start : start + len(name)] = name
    unit = panel.x_label
    if len(unit) < MARGIN and not "".join(below[: len(unit) + 1]).strip():
        below[: len(unit)] = unit
        unit = ""
    numbers = "".join(below).rstrip() + (f"\n{unit:>{len(below)}}" if unit else "")
    return " " * (MARGIN - 1) + "└" + "".join(rule) + "\n" + numbers


class _Canvas:
    """Cells of dots; a cell has the colour of the last line that went through it."""

    def __init__(self, columns: int, rows: int, limits: tuple[float, float, float, float]) -> None:
        self.columns, self.rows = columns, rows
        self._limits = limits
        self._dots = [[0] * columns for _ in range(rows)]
        self._colors = [[""] * columns for _ in range(rows)]
        self._ends: dict[int, tuple[str, str]] = {}
        self._number = 0

    def draw(self, line: Line, *, log_x: bool) -> None:
        self._number += 1
        color = COLORS[line.color % len(COLORS)]
        places = [self._place(x, y) for x, y in self._thinned(line.points(log_x=log_x))]
        for one, other in pairwise(places):
            self._segment(one, other, color)
        for x, y in places if line.marked or len(places) == 1 else ():
            for across, down in ((0, 0), (1, 0), (0, 1), (1, 1)):
                self._dot(x + across, y + down, color)
        if places:
            row = min(max(places[-1][1] // 4, 0), self.rows - 1)
            while row in self._ends and row + 1 < self.rows:
                row += 1
            self._ends[row] = (str(self._number), color)

    def row(self, row: int) -> Text:
        text = Text()
        for dots, color in zip(self._dots[row], self._colors[row], strict=True):
            text.append(chr(0x2800 + dots) if dots else " ", color)
        if self._number > 1 and row in self._ends:
            text.append(*self._ends[row])
        return text

    def _thinned(self, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return at most a point for each column of dots: the mean of those that fall into it."""
        if len(points) <= 2 * self.columns:
            return points
        low, high = self._limits[:2]
        bins: dict[int, list[tuple[float, float]]] = {}
        for x, y in points:
            bins.setdefault(int((x - low) / (high - low) * 2 * self.columns), []).append((x, y))
        return [
            (sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some))
            for some in bins.values()
        ]

    def _place(self, x: float, y: float) -> tuple[int, int]:
        x_low, x_high, y_low, y_high = self._limits
        across = (x - x_low) / (x_high - x_low) * (2 * self.columns - 1)
        down = (y_high - y) / (y_high - y_low) * (4 * self.rows - 1)
        return round(across), max(-8 * self.rows, round(down))

    def _segment(self, one: tuple[int, int], other: tuple[int, int], color: str) -> None:
        n = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
        for k in range(n + 1):
            x = one[0] + (other[0] - one[0]) * k / n
            y = one[1] + (other[1] - one[1]) * k / n
            self._dot(round(x), round(y), color)

    def _dot(self, x: int, y: int, color: str) -> None:
        if 0 <= x < 2 * self.columns and 0 <= y < 4 * self.rows:
            self._dots[y // 4][x // 2] |= DOTS[y % 4][x % 2]
            self._colors[y // 4][x // 2] = color
