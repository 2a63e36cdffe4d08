"""Curves in characters."""

import math

from tiedgpt.plots.panel import Line, Panel
from tiedgpt.plots.terminal import draw, print_panels

LINES = (
    Line("low", range(5), [0, 0, 1, 1, 2], 3), Line("", [], []),
    Line("high", range(5), [4, 3, 3, 4, 9], color=17),
)  # fmt: skip


def drawn(panel: Panel, **size) -> list[str]:
    return [row.rstrip() for row in draw(panel, **size).plain.rstrip("\n").split("\n")]


def cells(rows: list[str]) -> list[str]:
    """Return the plot's own rows, right of the axis."""
    return [row.partition("┤" if "┤" in row else "│")[2] for row in rows if set(row) & set("┤│")]


def test_without_unicode_lines_are_drawn_with_their_numbers_below_the_cut():
    panel = Panel("two", "steps", LINES, most=4.0)
    assert drawn(panel, width=40, height=6, unicode=False) == [
        "two  1 low  3 high",
        "4+3                           33       3",
        " | 333333333333333333333333333",
        "2+                                     1",
        " |                                 1111",
        " |                   11111111111111",
        "0+1111111111111111111",
        " ++------------------+-----------------+",
        "  0                  2                 4",
        "                   steps",
    ]
    styles = [*dict.fromkeys(str(span.style) for span in draw(panel).spans)]
    assert styles[:3] == ["bold", "not bold color(2)", "not bold color(1)"]
    assert {*styles[3:]} == {"color(2)", "color(1)"}


def test_a_line_ends_where_its_points_do_and_the_axes_are_as_wide_as_their_limits():
    panel = Panel("", "steps", LINES[:1], x_limits=(-4, 12))
    for height in (5, 3):
        rows = drawn(panel, width=33, height=height, unicode=False)[1:]
        columns = [at for row in rows[:height] for at, cell in enumerate(row) if cell == "1"]
        assert (min(columns), max(columns)) == (10, 17)  # 0 and 4 of -4 to 12 on 31 columns
        assert [row[:2] for row in rows[:height]] == ["2+", *[" |"] * (height - 2), "0+"]
        assert rows[height:] == [
            " +--------+--------+--------+----",
            "          0        5       10",
            "               steps",
        ]


def test_a_point_far_above_the_cut_is_drawn_at_twice_the_height():
    panel = Panel("", "", (Line("", [0, 4], [-1, 1e30]),), most=1.0)
    rows = [row[2:] for row in drawn(panel, width=33, height=5, unicode=False)[1:7]]
    assert rows == [" " * at + "111" for at in (15, 12, 9, 6, 3, 0)]


def test_no_row_is_wider_than_asked_for():
    lines = tuple(Line(f"a run of a long name {n}", range(50), range(50), n) for n in range(25))
    for width in (40, 80, 120):
        rows = drawn(Panel("loss", "tokens", lines), width=width, height=9)
        assert max(map(len, rows)) <= width
        assert "25 a run of a long name 24" in " ".join(" ".join(rows).split())


def test_panels_are_as_wide_as_the_terminal_and_the_third_is_lower(monkeypatch, capsys):
    for columns in (93, 120, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_panels([Panel("two", "steps", LINES[::2])] * 3)
        rows = capsys.readouterr().out.splitlines()
        assert max(map(len, rows)) == min(columns, 120) and rows[0] == "two  1 low  2 high"
        assert [at for at, row in enumerate(rows) if "└" in row] == [13, 30, 42]


def test_lines_that_end_together_have_labels_at_different_places():
    lines = tuple(Line(str(n), range(41), [n] * 40 + [9.0], n) for n in range(3))
    rows = cells(drawn(Panel("three", "steps", lines, most=2.0), width=43, height=5))
    assert [[row.find(number) for number in "123"] for row in rows] == [
        [40, -1, 36], [-1] * 3, [-1, 38, -1], [-1] * 3, [-1] * 3,
    ]  # fmt: skip


def test_an_empty_plot_says_so():
    panel = Panel("loss", "", (Line("", [1], [math.nan]),))
    assert drawn(panel) == ["loss", "nothing to draw yet"]


def test_axes_name_round_numbers_or_the_powers_of_ten_within_their_limits():
    panel = Panel("", "rate", (Line("", [1e-5, 1e-3, 1], [3, 2, 1]),), log_x=True)
    assert drawn(panel)[-2].split() == ["1e-05", "0.0001", "0.001", "0.01", "0.1", "1"]
    panel = Panel("", "tokens", (Line("", [2e4, 119e3], [2.1, 3]),))
    for size, names in (({}, ["3", "2.8", "2.6", "2.4", "2.2"]), ({"height": 3}, ["3", "2.5"])):
        rows = drawn(panel, **size)
        assert [row.split("┤")[0].strip() for row in rows if "┤" in row] == names
        assert len(cells(rows)) == size.get("height", 14) and max(map(len, rows)) == 80
    for width, step in ((100, 10), (60, 20), (29, 50)):
        names = [f"{n}k" for n in range(20, 120) if n % step == 0]
        assert drawn(panel, width=width)[-2].split() == names
