"""Panels as a PNG, SVG or PDF, by matplotlib, which is imported when a figure is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.files import replacing
from tiedgpt.plots.panel import Grid, Panel
from tiedgpt.signatures import checked

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind people tell apart."""
STYLES = ("solid", "dashed", "dotted", "dashdot")
"""One for each time that all colours were used."""
MOST_NAMES = 64
"""More places than this on an axis are numbered."""
MANY = 2000
"""More points than this are drawn as pixels, also in an SVG."""


def require_figures(path: Path) -> None:
    """Raise `UserError` for a name of another format, and where matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} is no figure", hint="name it .png, .svg or .pdf")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"figures need matplotlib, which is missing ({error})",
            hint="pip install 'tiedgpt[plot]'",
        ) from None


@checked
def save_figure(
    panels: Sequence[Panel | Grid], path: Path, title: str, *, columns: int = 2
) -> None:
    """Write the panels, some in a row, to a file of the format that its name says.

    Raises `UserError` as `require_figures`.
    """
    require_figures(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(5.2 * columns + 0.6, 3.3 * rows + 0.4), layout="constrained")
        figure.suptitle(_drawable(title), fontsize=12)
        all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, axes in zip(panels, all_axes, strict=False):
            axes.set_title(_drawable(panel.title), fontsize=10, loc="left")
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            if isinstance(panel, Grid):
                _fill_grid(panel, axes)
            else:
                _fill(panel, axes)
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix.lower().removeprefix("."), dpi=150)


def _drawable(text: str) -> str:
    """Return a text without mathematics; characters that the font lacks are escaped."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    characters = (c if c == "\n" or font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in text)
    return "".join(characters).replace("$", r"\$")


def _name(axis: Any, names: Sequence[str]) -> None:
    """Write names at the positions 0, 1, ... of an axis, or numbers if there are too many."""
    from matplotlib.ticker import MaxNLocator

    if 0 < len(names) <= MOST_NAMES:
        axis.set_ticks(range(len(names)), [_drawable(name) for name in names], fontsize=7)
        if axis.axis_name == "x" and max(map(len, names)) > 3:
            axis.set_tick_params(rotation=90)
    else:
        axis.set_major_locator(MaxNLocator(integer=True))


def _fill_grid(grid: Grid, axes: Any) -> None:
    most = max((abs(v) for row in grid.values for v in row if math.isfinite(v)), default=0) or 1
    style = {"cmap": "RdBu_r", "vmin": -most, "vmax": most} if grid.signed else {"cmap": "cividis"}
    image = axes.imshow(grid.values, aspect="auto", interpolation="nearest", **style)
    axes.figure.colorbar(image, ax=axes, label=grid.unit)
    _name(axes.xaxis, grid.x_names)
    _name(axes.yaxis, grid.y_names)
    for y, row in enumerate(grid.texts):
        for x, text in enumerate(row):
            red, green, blue, _ = image.cmap(image.norm(grid.values[y][x]))
            luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
            color = "black" if luminance > 0.18 else "white"  # the larger contrast
            axes.text(x, y, _drawable(text), ha="center", va="center", fontsize=6, color=color)


def _fill(panel: Panel, axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    for line in panel.lines:
        times, number = divmod(line.color, len(COLORS))
        color, style = COLORS[number], STYLES[times % len(STYLES)]
        if len(line.low):
            axes.fill_between(line.xs, line.low, line.high, color=color, alpha=0.2, linewidth=0)
        axes.plot(
            line.xs,
            line.ys,
            label=_drawable(line.name),
            color=color,
            linestyle=style,
            linewidth=1.4 if line.joined else 0,
            marker="o" if line.marked or not line.joined or len(line.xs) == 1 else None,
            markersize=3 if line.joined or line.marked else 1.5,
            rasterized=len(line.xs) > MANY,
        )
    for x, y, text in panel.notes:
        axes.annotate(_drawable(text), (x, y), (3, 3), textcoords="offset points", fontsize=7)
    if panel.log_x:
        axes.set_xscale("log")
    elif panel.x_names:
        _name(axes.xaxis, panel.x_names)
    elif any(abs(x) >= 1000 for line in panel.lines for x in line.xs):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if (limits := panel.limits()) is not None:
        low, high = limits[2:]
        room = 0.04 * (high - low)
        axes.set_ylim(low - room, high + room)
        if panel.x_limits is not None:
            room = 0.04 * (limits[1] - limits[0])
            axes.set_xlim(limits[0] - room, limits[1] + room)
    if len(panel.lines) > 1:
        axes.legend(fontsize=8, frameon=False)
