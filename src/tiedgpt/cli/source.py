"""What a user names on the command line: a run, or else the newest, and this program itself."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tiedgpt.errors import UserError

RUNS = Path("runs")


def source_or_newest(source: str | None) -> str:
    """Return the source given, or the newest run under runs/ that has a model."""
    return source if source is not None else str(newest_run("model/config.json"))


def newest_run(holding: str) -> Path:
    """Return the run under runs/ whose file `holding` is the newest, and say which it is."""
    runs = [run for run in RUNS.glob("*") if (run / holding).exists()]
    if not runs:
        raise UserError("no run is named and there is none in runs/: name one, or train first")
    newest = max(runs, key=lambda run: (run / holding).stat().st_mtime)
    print(f"(the newest run: {newest})", file=sys.stderr)
    return newest


def program() -> str:
    """Return how this program can be called again from here."""
    called = sys.argv[0]
    if Path(called).stem != "tiedgpt":
        return f"{Path(sys.executable).name} -m tiedgpt"
    return "tiedgpt" if shutil.which("tiedgpt") == called else os.path.relpath(called)
