"""Limits, ticks, smoothing: the arithmetic of figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.plots.panel import Line, Panel, label, smoothed, ticks, usual_most

FINITE = st.floats(-1e6, 1e6)


@given(FINITE, st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_lie_within_the_limits_and_are_no_more_than_asked_for(low, span, at_most):
    high = low + span
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high, at_most)
    assert 1 <= len(found) <= at_most
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert found == sorted(found)


def test_ticks_are_round_numbers():
    assert ticks(0.33, 2.6, 6) == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert ticks(0, 100_000, 5) == [0, 25_000, 50_000, 75_000, 100_000]
    assert ticks(0, 120_000, 7) == [0, 20_000, 40_000, 60_000, 80_000, 100_000, 120_000]
    assert ticks(0, 24, 3) == [0, 10, 20]
    assert ticks(-5, 5, 5) == [-4, -2, 0, 2, 4] and ticks(-5, 5, 4) == [-5, 0, 5]


def test_tick_labels_are_short():
    values = [0.5, 0.0, 999.0, 1000.0, 20_000.0, 1e6, 2.5e6, 1e9, 1e-4, 0.1 + 0.2, -3000.0]
    assert [label(value) for value in values] == [
        "0.5", "0", "999", "1k", "20k", "1M", "2.5M", "1G", "0.0001", "0.3", "-3k",
    ]  # fmt: skip


def test_smoothing_is_unbiased_at_the_start_and_skips_non_finite_values():
    assert smoothed([3.0] * 50) == pytest.approx([3.0] * 50)
    expected = [math.nan, 8, 16 / 3, 16 / 3, 24 / 7]  # (8 / 4 + 4 / 2 + 2) / (1 / 4 + 1 / 2 + 1)
    assert smoothed([math.nan, 8, 4, math.inf, 2], 0.4) == pytest.approx(expected, nan_ok=True)
    assert smoothed([5, *[0] * 99])[:2] == pytest.approx([5, 2]) and smoothed([8, 2]) == [8, 2]


def test_a_high_beginning_does_not_flatten_the_rest():
    falling = Line("loss", range(100), [100.0, 50.0, *([1.0 + n / 100 for n in range(98)])])
    low = Line("", [0, 1, 2], [0.5, math.nan, 0.25])
    most = usual_most([falling, low, Line("", [], [])])
    assert most == 1.96 and usual_most([low]) == 0.5 and usual_most([]) is None
    assert Panel("loss", "steps", (falling,), most=most).limits() == (0.0, 99.0, 1.0, most)
    assert Panel("loss", "steps", (low,), most=most).limits() == (0, 2, 0.25, 0.5)
    below = Panel("", "", (low,), most=0.1, x_limits=(-3, 7)).limits()
    assert below == pytest.approx((-3, 7, 0.2375, 0.2625))


def test_limits_hold_shaded_intervals_and_finite_points_alone():
    nothing = Line("loss", [1, 2], [math.nan, math.inf])
    assert Panel("loss", "steps", (nothing, Line("", [], []))).limits() is None
    shaded = Line("", [1, 2], [3, 3], low=[2, math.nan], high=[5, 7])
    assert Panel("loss", "steps", (nothing, shaded)).limits() == (1, 2, 2, 7)


def test_one_point_and_a_constant_have_limits_that_differ():
    assert Panel("", "", (Line("", [5], [-2]),)).limits() == pytest.approx((4.75, 5.25, -2.1, -1.9))
    assert Panel("", "", (Line("", [0], [0]),)).limits() == (-1, 1, -1, 1)
