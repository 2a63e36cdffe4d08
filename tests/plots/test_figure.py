"""Figures as files."""

import math
import sys

import pytest

from tiedgpt.errors import UserError
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Grid, Line, Panel
from tiedgpt.plots.terminal import draw

BEGINS = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.PDF": b"%PDF"}
OKABE_AND_ITO = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Return a function that returns matplotlib's figure of some panels, and its axes."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: (
        figures.append(figure), path.touch()))  # fmt: skip

    def save(panels, title="", **options):
        save_figure(panels, tmp_path / "a.svg", title, **options)
        return figures[-1], figures[-1].axes

    return save


@pytest.mark.parametrize("name", BEGINS)
def test_a_figures_format_follows_its_file_name(tmp_path, name):
    many = Line("a", range(3000), range(3000), joined=False)
    save_figure([Panel("$few", "tokens", (many,))], tmp_path / name, "a title")
    data = (tmp_path / name).read_bytes()
    assert data.startswith(BEGINS[name]) and 3000 < len(data) < 150_000  # pixels, not 3,000 points
    assert name != "a.png" or (data[16:24] == bytes.fromhex("00000366 0000022b"))  # 870 x 555
    assert name != "a.svg" or (b"<!-- $few -->" in data and b"Oblique" not in data)  # no formula
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_panels_stand_in_rows_of_one_size(drawn):
    panels = [Panel(f"title {n}", "x", (), y_label="y") for n in range(5)]
    for columns, rows, size in ((3, 2, (16.2, 7)), (2, 3, (11, 10.3)), (7, 1, (26.6, 3.7))):
        figure, axes = drawn(panels, "5 \npanneaux carrés", columns=columns)
        assert figure.get_size_inches() == pytest.approx(size)
        assert axes[4].get_gridspec().get_geometry() == (rows, min(columns, 5))
        assert figure.get_suptitle() == "5 \npanneaux carrés"
        named = [(one.get_title("left"), one.get_xlabel(), one.get_ylabel()) for one in axes[:5]]
        assert named == [(f"title {n}", "x", "y") for n in range(5)]
        assert [one.axison for one in axes] == [True] * 5 + [False] * (-5 % min(columns, 5))
    assert drawn(panels)[0].get_size_inches() == pytest.approx((11, 10.3))


def test_axes_have_short_ticks_and_room_and_log_scales_where_they_are_wanted(drawn):
    names = {"x_names": ["abc", "' $c'"]}
    _, axes = drawn([
        Panel("", "", (Line("a", [2, 98], [0.1, 0.2]),), x_limits=(2, 102), **names),
        Panel("", "", (Line("a", [1, 10], [-1, 3]), Line("b", [1, 1000], [0, 0])), notes=[
            (2, 3, "文 $b$")]),
        Panel("", "", (Line("a", [1, 999], [1, 2]),), log_x=True, **names),
        Panel("", "", (Line("a", [1, 999], [1, math.nan]),), x_names=["abc"] * 64),
        Panel("", "", (Line("a", [0], [1]),), x_names=["abc"] * 65),
    ])  # fmt: skip
    assert axes[0].get_xlim() == pytest.approx((-2, 106))
    assert axes[0].get_ylim() == pytest.approx((0.096, 0.204))
    assert axes[1].get_ylim() == pytest.approx((-1.16, 3.16))
    assert axes[1].xaxis.get_major_formatter()(50_000) == "50k"
    ((note,),) = [one.texts for one in axes if one.texts]
    assert (note.get_text(), note.xy) == (r"\u6587 \$b\$", (2, 3))
    assert [one.get_xscale() for one in axes[:3]] == ["linear", "linear", "log"]
    labels = [[text.get_text() for text in one.xaxis.get_ticklabels()] for one in axes[:5]]
    assert labels[0] == ["abc", r"' \$c'"] and labels[3] == ["abc"] * 64
    assert "abc" not in labels[2] + labels[4] and axes[0].get_xticks().tolist() == [0, 1]
    assert axes[4].xaxis.get_major_locator().tick_values(0, 2).tolist() == [0, 1, 2]
    turned = [one.xaxis.get_ticklabels()[0].get_rotation() for one in axes[:5]]
    assert turned == [90, 0, 0, 0, 0]
    assert [one.get_legend() is not None for one in axes[:5]] == [False, True, False, False, False]


def test_a_line_has_a_colour_and_a_style_of_its_own_and_markers_where_they_are_needed(drawn):
    lines = [Line(f"run {n} $", [0, 1], [n, n + 1], n) for n in range(25)]
    looks = {"marked": True}, {"marked": True, "joined": False}, {"joined": False}
    lines += [Line("", [0, 1], [0, 1], **look) for look in looks]
    lines += [Line("", [3], [5], low=[4], high=[7])]
    lines += [Line("", range(n), [1] * n) for n in (2000, 2001)]
    _, (axes,) = drawn([Panel("", "", tuple(lines))])
    curves = axes.get_lines()
    looks = [(curve.get_color(), curve.get_linestyle()) for curve in curves]
    styles = ["-", "--", ":", "-.", "-"]
    assert looks[:25] == [(OKABE_AND_ITO[n % 6], styles[n // 6]) for n in range(25)]
    markers = [(one.get_linewidth(), one.get_marker(), one.get_markersize()) for one in curves[24:]]
    assert markers == [
        (1.4, "None", 3), (1.4, "o", 3), (0, "o", 3), (0, "o", 1.5),
        (1.4, "o", 3), (1.4, "None", 3), (1.4, "None", 3),
    ]  # fmt: skip
    assert [curve.get_rasterized() for curve in curves[-2:]] == [False, True]
    assert curves[7].get_xydata().tolist() == [[0, 7], [1, 8]]
    assert not any(axes.spines[side].get_visible() for side in ("top", "right"))
    (interval,) = axes.collections
    assert interval.get_paths()[0].get_extents().extents.tolist() == [3, 4, 3, 7]
    assert axes.get_legend().get_texts()[3].get_text() == r"run 3 \$"
    text = draw(Panel("", "", tuple(lines[:12])), width=120)
    names = {style: 0 for span in text.spans if "not bold" in (style := str(span.style))}
    hues = [6, 5, 3, 2, 4, 1]  # cyan, magenta, yellow, green, blue, red; then bright
    assert [*names] == [f"not bold color({hue})" for hue in [*hues, *(hue + 8 for hue in hues)]]


def test_a_grid_shows_its_values_in_colours_and_its_texts_in_contrast(drawn):
    values = [[1.0, -2.0, math.nan]]
    _, axes = drawn([
        Grid("", "x", "y", "bits", values, [["$1", "文"]], ["abcd"], ["abcd"], signed=True),
        Grid("", "x", "y", "", [[float(n) for n in range(70)]] * 2, [["a"] * 70]),
        Grid("", "x", "y", "", [[n - 34.5 for n in range(70)]], [["a"] * 70], signed=True),
        Grid("", "x", "y", "", [[0.0]], signed=True),
    ], columns=4)  # fmt: skip
    ranges = [(one.images[0].get_clim(), one.images[0].cmap.name) for one in axes[:4]]
    assert [most for (_, most), _ in ranges] == [2, 69, 34.5, 1]
    assert [least for (least, _), _ in ranges] == [-2, 0, -34.5, -1]
    assert [colors for _, colors in ranges] == ["RdBu_r", "cividis", "RdBu_r", "RdBu_r"]
    assert axes[0].images[0].get_array().filled(9).tolist() == [[1, -2, 9]]
    texts = [(text.get_text(), text.get_position(), text.get_color()) for text in axes[0].texts]
    assert texts == [(r"\$1", (0, 0), "black"), (r"\u6587", (1, 0), "white")]
    colors = ["".join(text.get_color()[0] for text in one.texts) for one in axes[1:3]]
    assert colors == ["w" * 33 + "b" * 37, "w" * 10 + "b" * 48 + "w" * 12]  # by WCAG's luminance
    names = [*axes[0].xaxis.get_ticklabels(), *axes[0].yaxis.get_ticklabels()]
    assert [(name.get_text(), name.get_rotation()) for name in names] == [("abcd", 90), ("abcd", 0)]
    assert axes[4].get_ylabel() == "bits"


def test_unknown_suffixes_and_missing_matplotlib_are_reported_before_drawing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"name it \.png"):
        save_figure([], tmp_path / "curves.gif", "")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'tiedgpt\[plot\]'"):
        save_figure([], tmp_path / "curves.png", "")
