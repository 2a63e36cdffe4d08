"""The run of some options on some data: new, to be resumed, to be prolonged, or finished."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.train.plan.groups import DURATIONS, RunOptions
from tiedgpt.train.plan.time import prolong
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.store.checkpoint import require_unchanged
from tiedgpt.train.store.directory import RunDirectory, plan_tables, read_plan
from tiedgpt.train.store.runs import compare_duration, find_run


@dataclass(frozen=True)
class Run:
    """A run's directory, with the model's config and the plan as in its run.toml."""

    directory: RunDirectory
    config: GPTConfig
    plan: Plan


@dataclass(frozen=True)
class OpenRun:
    """A locked directory and the run in it."""

    directory: RunDirectory
    digest: str | None
    """Digest of the data; None: the documentation of Python."""
    run: Run | None = None
    """The run to resume; None: a new one."""
    is_finished: bool = False


@contextlib.contextmanager
def open_run(options: RunOptions, digest: str | None, out: str | Path | None) -> Iterator[OpenRun]:
    """Lock the directory of these options on this data, and yield the run in it.

    A finished run is prolonged if the options ask for a longer duration. Raises `UserError` if the
    run has other options or other data, and `CorruptInputError` if its files were changed.
    """
    directory = RunDirectory(Path(out or find_run(options, digest)))
    with directory.lock():
        tables = directory.read_record()
        if not tables:
            yield OpenRun(directory, digest)
            return
        factor = compare_options(options, directory.path)
        if digest != tables.get("text", {}).get("sha256"):
            raise UserError(
                f"the text has changed since {directory.path} began",
                hint="give another --out, or the same text",
            )
        config, plan = read_plan(tables)
        require_unchanged(directory, config, plan)
        if factor is not None:
            last_step = directory.read_metrics()[-1]["step"]
            plan = prolong(plan, options, last_step, factor)
            durations = {name: getattr(options, name) for name in DURATIONS}
            requested = {"options": tables["options"] | durations}
            directory.write_record({**tables, **requested, **plan_tables(plan)})
        is_finished = factor is None and directory.is_finished()
        yield OpenRun(directory, digest, Run(directory, config, plan), is_finished)


def compare_options(options: RunOptions, out: str | Path) -> float | None:
    """Raise `UserError` if the run in `out` has other options.

    Returns the factor by which a finished run is prolonged, or None.
    """
    directory = RunDirectory(Path(out))
    tables = directory.read_record()
    differences = options.differences(tables.get("options", {})) if tables else []
    factor = compare_duration(options, tables) if differences and directory.is_finished() else None
    if differences and factor is None:
        raise UserError(
            f"{out} holds a run with other options ({'; '.join(differences)})",
            hint=f"give the same options to resume, or another --out, with --start {out} to begin "
            "from its weights",
        )
    return factor
