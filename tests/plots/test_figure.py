"""Figures as files."""

import re
import sys

import pytest

from tiedgpt.errors import UserError
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Grid, Line, Panel
from tiedgpt.plots.terminal import draw

PANELS = [
    Panel("loss", "tokens", (Line("a", [0, 5e4], [2, 1]), Line("b", [0, 5e4], [3, 1], 1, True))),
    Panel("rate", "tokens", (Line("a", [1e-4, 1e-2], [1, 2]),), log_x=True),
    Panel("few", "tokens", (Line("a", [1], [2]),)),
]
BEGINS = {"curves.png": b"\x89PNG", "curves.svg": b"<?xml", "curves.PDF": b"%PDF"}


@pytest.mark.parametrize("name", BEGINS)
def test_a_figures_format_follows_its_file_name(tmp_path, name):
    save_figure(PANELS, tmp_path / name, "a title")
    data = (tmp_path / name).read_bytes()
    assert data.startswith(BEGINS[name]) and len(data) > 3000
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_axes_have_short_ticks_and_room_and_a_point_is_larger_than_those_of_a_cloud(tmp_path):
    near = Panel("near", "s", (Line("a", [2, 98], [0.102, 0.198]),), x_limits=(2, 98))
    cloud = Panel("cloud", "s", (Line("a", [0, 1], [0, 1], joined=False),))
    far = Panel("far", "s", (Line("a", [0, 5e4], [0, 1]),))
    save_figure([near, cloud, far, PANELS[2]], tmp_path / "a.svg", "")
    drawn = (tmp_path / "a.svg").read_text()
    assert {"50k", "100", "0.20"} <= {*re.findall("<!-- (.*?) -->", drawn)}
    assert {"1.5", "0.75"} <= {*re.findall(r'<path id="m\w+" d="M 0 ([\d.]+)', drawn)}


def test_unknown_suffixes_and_missing_matplotlib_are_reported_before_drawing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"name it \.png"):
        save_figure(PANELS, tmp_path / "curves.gif", "")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'tiedgpt\[plot\]'"):
        save_figure(PANELS, tmp_path / "curves.png", "")


def test_more_runs_than_colours_can_be_told_apart(tmp_path):
    lines = tuple(Line(f"run {n}", [0, 1], [n, n + 1], n) for n in range(13))
    save_figure([Panel("loss", "tokens", lines)], tmp_path / "many.svg", "")
    curves = re.findall(r'id="line2d_\d+">\s*<path d="[^"]*" clip-path[^>]*style="([^"]*)"',
                        (tmp_path / "many.svg").read_text())  # fmt: skip
    looks = [re.sub(r"stroke-(width|linecap): [^;]*;?", "", look) for look in curves]
    assert len({look for look in looks if "b0b0b0" not in look}) >= 13
    text = draw(Panel("loss", "tokens", lines[:12]), width=120)
    assert len({str(span.style) for span in text.spans if "not bold" in str(span.style)}) == 12


def test_texts_are_drawn_as_they_are_and_many_points_as_pixels(tmp_path):
    cloud = Line("$a_1$", list(range(1, 3000)), list(range(1, 3000)), joined=False)
    panels = [
        Panel("$x", "count", (cloud, cloud), log_x=True, y_label="y", notes=[(10, 10, "文 $b$")]),
        Panel("names", "token", (Line("a", [0, 1], [1, 2]),), x_names=["' $c'", "'文'"]),
        Grid("grid", "x", "y", "bits", [[1.0, -2.0]], [["$1", "文"]], ["p$", "q$"], signed=True),
        Grid("numbered", "x", "y", "bits", [[float(n) for n in range(70)]] * 2),
    ]
    save_figure(panels, tmp_path / "a.svg", "tokens $", columns=4)
    drawn = (tmp_path / "a.svg").read_text()
    assert len(drawn) < 400_000  # a point each would be more
    for text in ("$x", "文 $b$".encode("ascii", "backslashreplace").decode(), "' $c'", "p$"):
        assert f"<!-- {text} -->" in drawn
    assert "Oblique" not in drawn  # the font of mathematics
