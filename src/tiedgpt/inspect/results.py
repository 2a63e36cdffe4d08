"""What the functions of this package return: columns of numbers, and their JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tiedgpt.tie.findings import plain

NOT_IN_JSON = {"json": False}
"""Metadata of a field that is for Python only: it would be megabytes of text."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base of all results: numpy arrays and plain values."""

    def to_json(self) -> str:
        """Return the fields as one JSON object, arrays as nested lists, NaN as null.

        Numbers keep all digits of the array's own type.
        """
        return json.dumps(_plain(self), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        kept = (field.name for field in fields(value) if field.metadata.get("json", True))
        return {name: _plain(getattr(value, name)) for name in kept}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if not isinstance(value, np.ndarray):
        return plain(value)
    if not np.issubdtype(value.dtype, np.floating):
        return value.tolist()
    if value.dtype != np.float64:  # 0.1, not 0.10000000149011612
        value = value.astype(str).astype(np.float64)
    return np.where(np.isfinite(value), value, np.array(None)).tolist()
