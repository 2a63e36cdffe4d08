"""Figures as files."""

import sys

import pytest

from tiedgpt.errors import UserError
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Line, Panel

PANELS = [
    Panel("loss", "tokens", (Line("a", [0, 5e4], [2, 1]), Line("b", [0, 5e4], [3, 1], 1, True))),
    Panel("rate", "tokens", (Line("a", [1e-4, 1e-2], [1, 2]),), log_x=True),
    Panel("few", "tokens", (Line("a", [1], [2]),)),
]
BEGINS = {"curves.png": b"\x89PNG", "curves.svg": b"<?xml", "curves.PDF": b"%PDF"}


@pytest.mark.parametrize("name", BEGINS)
def test_a_figure_is_of_the_format_that_its_name_says(tmp_path, name):
    save_figure(PANELS, tmp_path / name, "a title")
    data = (tmp_path / name).read_bytes()
    assert data.startswith(BEGINS[name]) and len(data) > 3000
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_name_and_a_missing_matplotlib_are_told_before_anything_is_drawn(
    tmp_path, monkeypatch
):
    with pytest.raises(UserError, match=r"name it \.png"):
        save_figure(PANELS, tmp_path / "curves.gif", "")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install tiedgpt\[plot\]"):
        save_figure(PANELS, tmp_path / "curves.png", "")
