"""Results of the inspections: numpy arrays, with a JSON form, a table and a figure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiedgpt.plots.panel import Grid, Line, Panel
from tiedgpt.plots.table import visible
from tiedgpt.runtime import to_json_data

NOT_IN_JSON = {"json": False}
"""Metadata of a field that is for Python only: it would be megabytes of text."""
SHOWN_ROWS = 10
"""Default number of rows in a table of tokens."""
LABELLED = 5
"""Number of points or lines that a figure labels."""
MAX_TEXT_COLUMNS = 16
"""Maximum number of columns of a grid whose cells contain text."""

Figure = tuple[str, list[Panel | Grid]]
"""A title, and the panels below it."""


@dataclass(frozen=True, kw_only=True)
class Result(ABC):
    """Base of all results: numpy arrays, plain values, and dataclasses of them."""

    def to_json(self) -> str:
        """Return the fields as one JSON object, arrays as nested lists, NaN as null.

        Numbers keep all digits of the array's own type.
        """
        return json.dumps(to_json_data(self), ensure_ascii=False, allow_nan=False)

    @abstractmethod
    def table(self, top: int = SHOWN_ROWS) -> str:
        """Return what `tiedgpt inspect` prints; `top` rows of a table that has one for each id."""

    @abstractmethod
    def figure(self) -> Figure:
        """Return what `tiedgpt inspect --plot` draws."""

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__  # in a notebook, too; a subclass is a dataclass(repr=False)


def lines(columns: dict[str, Any], *, joined: bool = True) -> tuple[Line, ...]:
    """Return a line for each column, over its index, with a marker at each point."""
    return tuple(
        Line(name, range(len(column)), np.asarray(column).tolist(), color, True, joined)
        for color, (name, column) in enumerate(columns.items())
    )


def token_axis(pieces: tuple[str, ...]) -> dict[str, Any]:
    """Return the label of an axis of tokens, and their names."""
    return {
        "x_label": "token, and its position",
        "x_names": [f"{visible(piece)} {at}" for at, piece in enumerate(pieces)],
    }
