"""What a user names on the command line: a run, or else the newest, and this program itself."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from tiedgpt.errors import UserError


def source_or_newest(source: str | None, *, task: Literal["lm"] | None = None) -> str:
    """Return the source given, or the newest run under runs/ that has a model (of the task)."""
    return source if source is not None else str(newest_run("model/config.json", task))


def newest_run(holding: str, task: Literal["lm"] | None = None) -> Path:
    """Return the run under runs/ whose file `holding` is the newest, and say which it is."""
    from tiedgpt.cli.console import note
    from tiedgpt.train.runs import RUNS, can_generate

    runs = [run for run in RUNS.glob("*") if (run / holding).exists()]
    runs = [run for run in runs if task is None or can_generate(run)]
    if not runs:
        what = "no run" if task is None else f"no run of --task {task}"
        raise UserError(f"no run is named and runs/ has {what}: name one, or train first")
    newest = max(runs, key=lambda run: (run / holding).stat().st_mtime)
    note(f"newest run: {newest}")
    return newest


def program() -> str:
    """Return how this program can be called again from here."""
    called = sys.argv[0]
    if Path(called).stem != "tiedgpt":
        return f"{Path(sys.executable).name} -m tiedgpt"
    return "tiedgpt" if shutil.which("tiedgpt") == called else os.path.relpath(called)
