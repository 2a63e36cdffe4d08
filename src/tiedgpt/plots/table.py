"""A table in plain text, for terminals, pipes and lessons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the heads, a rule and each row of a table, with two spaces between its columns.

    A column `>name` is aligned to the right. A cell may have several lines, and so may a row.
    """
    texts = [[column.lstrip(">") for column in columns], *map(list, rows)]
    cells = [[cell.split("\n") for cell in row] for row in texts]
    stacked = zip(*cells, strict=True)
    widths = [max(cell_len(line) for cell in column for line in cell) for column in stacked]
    lines = [
        "\n".join(_line(columns, parts, widths) for parts in zip_longest(*row, fillvalue=""))
        for row in cells
    ]
    return [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]]


def _line(columns: Sequence[str], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        padding = " " * (width - cell_len(cell))
        padded.append(padding + cell if column.startswith(">") else cell + padding)
    return "  ".join(padded).rstrip()


def visible(piece: str, width: int = 80) -> str:
    r"""Return a token's text with its spaces and controls visible, cut to a width: ' the', '\n'."""
    text = piece if piece.startswith(("bytes:\\x", "id:")) else repr(piece)
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 2)}.."


def token_cells(pieces: Iterable[str], width: int = 12) -> list[str]:
    """Return tokens' texts as `visible` writes them in a column."""
    return [visible(piece, width) for piece in pieces]


def number_table(*columns: tuple[str, Iterable[Any]]) -> str:
    """Return a table of columns, each a name and its values; numbers are aligned to the right."""
    values = [list(column) for _, column in columns]
    are_words = [all(isinstance(value, str) for value in column) for column in values]
    named = zip(columns, are_words, strict=True)
    heads = [name if is_words else f">{name}" for (name, _), is_words in named]
    return "\n".join(aligned(heads, zip(*map(number_cells, values), strict=True)))


def number_cell(value: float) -> str:
    """Return one number as `number_cells` writes it."""
    return number_cells([value])[0]


def number_cells(column: Iterable[Any]) -> list[str]:
    """Return a column's numbers with as many decimals as its largest leaves room for; "-": none."""
    values = [x if x == x else None for x in column]  # NaN is none
    sizes = [abs(x) for x in values if not isinstance(x, (str, type(None)))]
    size = max(sizes, default=0)
    is_whole = not any(isinstance(x, (float, np.floating)) for x in sizes)
    decimals = 0 if is_whole or size >= 1000 else 3 if size < 10 else 2 if size < 100 else 1
    cells = []
    for value in values:
        if value is None or isinstance(value, str):
            cells.append("-" if value is None else value)
        elif value and abs(value) < 0.5 * 10**-decimals:
            cells.append(f"{value:.0e}")
        else:
            cells.append(f"{value:,.{decimals}f}" if value else "0")
    return cells
