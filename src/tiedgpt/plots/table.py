"""A table in plain text, for terminals, pipes and lessons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the heads, a rule and each row of a table, with two blanks between its columns.

    A column `>name` is aligned to the right. A cell may have several lines, and so may a row.
    """
    made = [[column.lstrip(">") for column in columns], *map(list, rows)]
    cells = [[cell.split("\n") for cell in row] for row in made]
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
        blanks = " " * (width - cell_len(cell))
        padded.append(blanks + cell if column.startswith(">") else cell + blanks)
    return "  ".join(padded).rstrip()


def visible(piece: str, width: int = 80) -> str:
    r"""Return a token's text with its blanks and controls visible, cut to a width: ' the', '\n'."""
    text = piece if piece.startswith(("bytes:\\x", "id:")) else repr(piece)
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 2)}.."
