"""Figures from plain data: curves in the terminal, and as PNG, SVG or PDF.

For example:

    from pathlib import Path
    from tiedgpt.plots import Line, Panel, print_panels, save_figure

    panel = Panel("loss in nats", "steps", (Line("tied", [1, 2, 3], [4.0, 2.5, 2.1]),))
    print_panels([panel])
    save_figure([panel], Path("loss.svg"), "Training")  # needs tiedgpt[plot]
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
