"""Panels as a PNG, SVG or PDF, by matplotlib, which is imported when a figure is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.files import replacing
from tiedgpt.plots.panel import Panel

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind people tell apart."""


def save_figure(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Write the panels, two in a row, to a file of the format that its name says.

    Raises `UserError` for another name, and where matplotlib is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} is no figure: name it .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"figures need matplotlib, which is missing ({error}): pip install tiedgpt[plot]; "
            "without --out the curves are drawn here"
        ) from None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns + 0.6, 3.3 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, place in zip(panels, axes, strict=False):
        _fill(panel, place)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lower().removeprefix("."), dpi=150)


def _fill(panel: Panel, place: Any) -> None:
    from matplotlib.ticker import EngFormatter

    place.set_title(panel.title, fontsize=10, loc="left")
    place.set_xlabel(panel.x_label)
    place.spines[["top", "right"]].set_visible(False)
    place.grid(alpha=0.25)
    for line in panel.lines:
        place.plot(
            line.xs,
            line.ys,
            label=line.name,
            color=COLORS[line.color % len(COLORS)],
            linewidth=1.4,
            marker="o" if line.marked or len(line.xs) == 1 else None,
            markersize=3,
        )
    if panel.log_x:
        place.set_xscale("log")
    else:
        place.xaxis.set_major_formatter(EngFormatter(sep=""))
    if (limits := panel.limits()) is not None:
        low, high = limits[2:]
        room = 0.04 * (high - low)
        place.set_ylim(low - room, high + room)
    if len(panel.lines) > 1:
        place.legend(fontsize=8, frameon=False)
