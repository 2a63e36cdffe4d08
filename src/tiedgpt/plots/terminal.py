"""A panel in a terminal, drawn by plotext."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tiedgpt.plots.panel import Panel, label, ticks
from tiedgpt.signatures import checked

COLORS = (6, 5, 3, 2, 4, 1, 14, 13, 11, 10, 12, 9)
"""The terminal's own cyan, magenta, yellow, green, blue and red, and then the bright ones."""
ASCII = str.maketrans("┌┐└┘─│┬┤┼", "++++-|+++")


@checked
def print_panels(panels: Sequence[Panel]) -> None:
    """Print panels below one another, as wide as the terminal and at most 120 columns."""
    console = Console(highlight=False)
    width, unicode = min(console.width, 120), console.encoding.startswith("utf")
    for number, panel in enumerate(panels):
        text = draw(panel, width=width, height=12 if number < 2 else 7, unicode=unicode)
        console.print(text, soft_wrap=True)


def draw(panel: Panel, *, width: int = 80, height: int = 14, unicode: bool = True) -> Text:
    """Return the panel as text of at most `width` columns; `height` rows are the plot's own.

    Lines are of braille dots; without `unicode`, of their numbers.
    """
    import plotext

    limits = panel.limits()
    if limits is None:
        return Text.assemble((panel.title, "bold"), "\nnothing to draw yet\n")
    x_low, x_high, y_low, y_high = limits
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height + 3)
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    plotext.xlabel(panel.x_label)
    plotext.ylim(y_low, y_high)
    if panel.x_limits is not None:
        plotext.xlim(x_low, x_high)
    heights = ticks(y_low, y_high, max(2, height // 2))
    plotext.yticks(heights, list(map(label, heights)))
    if panel.log_x:
        plotext.xscale("log")
        powers = range(math.ceil(math.log10(x_low)), math.floor(math.log10(x_high)) + 1)
        places = [10.0**power for power in powers]
    else:
        places = ticks(x_low, x_high, max(2, width // 10))
    plotext.xticks(places, list(map(label, places)))
    heading = Text(panel.title, "bold")
    for number, line in enumerate(panel.lines, start=1):
        points = line.points()
        if not points:
            continue
        step = max(1, len(points) // (2 * width))
        xs, ys = zip(*points[::-1][::step], strict=True)
        color = COLORS[line.color % len(COLORS)]
        near = [min(y, 2 * y_high - y_low) for y in ys]  # far above takes long to draw
        plotext.plot(xs, near, color=color, marker="braille" if unicode else str(number))
        if len(panel.lines) > 1:
            index = min(len(xs) - 1, (number - 1) * len(xs) // 20)  # each at its own, from the end
            plotext.text(str(number), xs[index], min(ys[index], y_high), color=color)
            heading.append(f"  {number} {line.name}", f"not bold color({color})")
    drawn = plotext.build()
    heading = Text("\n").join(heading.wrap(Console(), width))
    return heading + "\n" + Text.from_ansi(drawn if unicode else drawn.translate(ASCII))
