"""Tables of numbers and tokens in plain text."""

import numpy as np

from tiedgpt.plots import table


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_end_together():
    columns = ("文字", ["a", "b"]), ("norm", [9.5, None]), ("id", [7, 12345])
    assert table.number_table(*columns).splitlines() == [
        "文字   norm      id",
        "-------------------",
        "a     9.500       7",
        "b         -  12,345",
    ]
    rows = [["a\nbc", "1"], ["d", "2\n34"]]
    assert table.aligned(["x", ">n"], rows) == ["x    n", "------", "a    1\nbc", "d    2\n    34"]


def test_a_column_has_as_many_decimals_as_its_largest_leaves_room_for():
    for column, cells in (
        ([0.0004, 9.5, -2], ["4e-04", "9.500", "-2.000"]),
        ([0.0005, 0, 10], ["5e-04", "0", "10.00"]),
        ([0.005, 99.875], ["0.01", "99.88"]),
        ([100.0, float("nan"), "x", None], ["100.0", "-", "x", "-"]),
        ([0.05, -999.75], ["0.1", "-999.8"]),
        ([1000.0, 0.25], ["1,000", "2e-01"]),
        ([3, -1234567], ["3", "-1,234,567"]),
        ([np.float32(0.25), np.int64(3)], ["0.250", "3.000"]),
    ):
        assert table.number_cells(column) == cells
    assert table.number_cell(1e-9) == "1e-09" and table.number_cells([None]) == ["-"]


def test_a_token_shows_its_blanks_and_is_cut_to_a_width():
    assert [table.visible(piece) for piece in (" the", "\n", "bytes:\\xe2", "id:7")] == [
        "' the'", r"'\n'", "bytes:\\xe2", "id:7",
    ]  # fmt: skip
    assert table.token_cells(["a" * 10, "a" * 11]) == [f"'{'a' * 10}'", f"'{'a' * 9}.."]
    assert (
        table.visible("文字文字", 10) == "'文字文字'"
        and table.visible("文字文字", 9) == "'文字文.."
    )
    assert table.visible("a" * 78) == f"'{'a' * 78}'" and len(table.visible("a" * 79)) == 80
