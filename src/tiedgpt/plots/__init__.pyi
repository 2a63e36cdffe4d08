from tiedgpt.plots.figure import save_figure as save_figure
from tiedgpt.plots.panel import Grid as Grid
from tiedgpt.plots.panel import Line as Line
from tiedgpt.plots.panel import Panel as Panel
from tiedgpt.plots.terminal import print_panels as print_panels
