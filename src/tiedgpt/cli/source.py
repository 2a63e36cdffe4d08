"""SOURCE on the command line: what is given, or else the newest run."""

from __future__ import annotations

import sys
from pathlib import Path

from tiedgpt.errors import UserError

RUNS = Path("runs")


def source_or_newest(source: str | None) -> str:
    """Return the source given, or the newest run under runs/ that has a model."""
    if source is not None:
        return source
    models = sorted(RUNS.glob("*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if not models:
        raise UserError("no model is named and there is no run in runs/: name one, or train first")
    newest = str(models[-1].parent.parent)
    print(f"(the newest run: {newest})", file=sys.stderr)
    return newest
