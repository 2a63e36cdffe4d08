"""Curves in characters."""

import math

from tiedgpt.plots.panel import Line, Panel
from tiedgpt.plots.terminal import draw


def drawn(panel: Panel, **size) -> list[str]:
    return draw(panel, **size).plain.rstrip("\n").split("\n")


def cells(rows: list[str]) -> list[str]:
    """Return the plot's own rows, right of the axis."""
    return [row.partition("┤" if "┤" in row else "│")[2] for row in rows if set(row) & set("┤│")]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right():
    rows = drawn(Panel("up", "steps", (Line("a", [0, 1, 2], [0, 1, 2]),)), width=40, height=8)
    plot = cells(rows)
    assert len(plot) == 8
    first = [row.index(next(c for c in row if c != " ")) for row in plot]
    assert first == sorted(first, reverse=True)
    assert plot[-1][0] != " " and plot[0].rstrip()[-1] != " "


def test_no_row_is_wider_than_asked_for():
    lines = tuple(Line(f"a run of a long name {n}", range(50), range(50), n) for n in range(4))
    for width in (40, 80, 120):
        rows = drawn(Panel("loss", "tokens", lines), width=width, height=9)
        assert max(map(len, rows)) <= width
        assert "4 a run of a long name 3" in " ".join(" ".join(rows).split())


def test_several_lines_are_told_apart_without_colours_too():
    lines = (Line("low", [0, 1], [0, 0]), Line("high", [0, 1], [1, 1], color=1))
    rows = drawn(Panel("two", "steps", lines), width=50, height=6)
    assert "1 low" in rows[0] and "2 high" in rows[0]
    plot = cells(rows)
    assert plot[0].endswith("2") and plot[-1].endswith("1")


def test_lines_that_end_together_or_above_the_cut_have_labels():
    many = tuple(Line(f"run {n}", range(40), [1.0] * 39 + [9.0], n) for n in range(3))
    plot = cells(drawn(Panel("three", "steps", many, most=2.0), width=60, height=6))
    assert all(any(number in row for row in plot) for number in "123")


def test_points_above_the_cut_are_not_drawn():
    line = Line("", [0, 1, 2, 3], [1e30, 1, 1, 0])
    plot = cells(drawn(Panel("", "", (line,), most=1.0), width=60, height=6))
    assert plot[0].strip() and plot[-1].strip()


def test_labels_are_placed_at_their_ticks_above_the_unit():
    panel = Panel("loss", "tokens", (Line("", [0, 100_000], [1.0, 2.0]),))
    *_, rule, numbers, unit = drawn(panel, width=80, height=10)
    assert unit.strip() == "tokens" and "40k" in numbers
    assert rule[numbers.index("40k") + 1] == "┬"


def test_an_empty_plot_says_so():
    assert "nothing to draw" in drawn(Panel("loss", "", (Line("", [1], [math.nan]),)))[1]


def test_a_hundred_thousand_points_are_thinned_and_keep_their_shape():
    n = 100_000
    line = Line("", range(n), [math.sin(k / n * math.tau) for k in range(n)])
    plot = cells(drawn(Panel("", "", (line,)), width=80, height=10))
    top = next(row for row in plot if row.strip())
    crest = [column for column, cell in enumerate(top) if cell != " "]
    assert 15 < sum(crest) / len(crest) < 21, "a quarter of the width"


def test_a_logarithmic_axis_names_the_powers_of_ten():
    panel = Panel("", "rate", (Line("", [1e-5, 1e-3, 1], [3, 2, 1]),), log_x=True)
    assert all(name in drawn(panel)[-2] for name in ("1e-05", "0.001", "0.1"))


def test_without_unicode_a_line_is_drawn_with_digits():
    lines = (Line("low", [0, 1], [0, 0]), Line("high", [0, 1], [1, 1], color=1))
    text = draw(Panel("two", "steps", lines), width=50, height=6, unicode=False).plain
    assert text.isascii() and text.count("1") > 30 and text.count("2") > 30
