"""Figures from plain data: curves in the terminal, and as PNG, SVG or PDF.

For example:

    from pathlib import Path
    from tiedgpt.plots import Line, Panel, print_panels, save_figure

    panel = Panel("loss in nats", "steps", (Line("tied", [1, 2, 3], [4.0, 2.5, 2.1]),))
    print_panels([panel])
    save_figure([panel], Path("loss.svg"), "Training")  # needs tiedgpt[plot]
"""

from typing import TYPE_CHECKING

from tiedgpt.names import lazy_names

if TYPE_CHECKING:
    from tiedgpt.plots.figure import save_figure as save_figure
    from tiedgpt.plots.panel import Grid as Grid
    from tiedgpt.plots.panel import Line as Line
    from tiedgpt.plots.panel import Panel as Panel
    from tiedgpt.plots.terminal import print_panels as print_panels

__getattr__, __dir__ = lazy_names(__name__)
