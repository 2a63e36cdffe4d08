"""Read metrics.jsonl as columns, and send its lines to a tracker. No torch.

If a tracker (trackio, Weights & Biases, TensorBoard) raises, one line says so, and training goes on
without it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tiedgpt.errors import UserError
from tiedgpt.files import missing_run, reading

TrackerName = Literal["trackio", "wandb", "tensorboard"]
Axis = Literal["tokens", "steps", "seconds"]
UNITS = ("tokens", "examples")
PART_PREFIX = "part_"
"""Prefix of the last evaluation's keys on the data that the evaluations before it took."""


@dataclass(frozen=True)
class History:
    """A run's metrics. A truncated last line is left out."""

    name: str
    unit: str
    """Unit of progress: tokens or examples."""
    columns: dict[str, dict[int, float]]
    """Values by key of metrics.jsonl and by step; all evaluations are on the same data."""
    final: dict[str, float]
    """The final score; {} before it."""
    samples: dict[int, str]
    """Samples by step."""
    skipped: int
    """Number of steps that were skipped for a loss or gradient that is not finite."""
    finished: bool
    _seconds: dict[int, float] = field(repr=False, default_factory=dict)

    @property
    def step(self) -> int:
        """The last step with a line; 0 without any."""
        return max((max(column) for column in self.columns.values() if column), default=0)

    @property
    def seconds(self) -> float:
        """Seconds spent in steps, without evaluations and checkpoints."""
        return max(self._seconds.values(), default=0.0)

    @property
    def units(self) -> int:
        """Number of tokens or examples trained on."""
        return int(max(self.columns.get(self.unit, {}).values(), default=0))

    def last(self, key: str) -> float | None:
        """Return the newest value of a key; of a score the final one, if there is one."""
        if key in self.final:
            return self.final[key]
        column = self.columns.get(key)
        return column[max(column)] if column else None

    def series(self, key: str, axis: Axis) -> tuple[list[float], list[float]]:
        """Return (positions on the axis, values) of a key; `tokens` may count examples."""
        column = self.columns.get(key, {})
        if axis == "steps":
            places = {step: float(step) for step in column}
        else:
            places = self._seconds if axis == "seconds" else self.columns.get(self.unit, {})
        pairs = [(places[step], y) for step, y in sorted(column.items()) if step in places]
        return [x for x, _ in pairs], [y for _, y in pairs]


def read_history(run: Path, name: str | None = None) -> History:
    """Read a run's metrics.jsonl, also during training; `UserError` if it is missing."""
    path = run / "metrics.jsonl"
    with reading(path, "metrics of a run"):
        if not path.exists():
            missing = None if run.exists() else missing_run(run)
            raise missing or UserError(
                f"{run} has no metrics.jsonl",
                hint="name a run's directory (runs/...), or train first",
            )
        text = path.read_text(encoding="utf-8", errors="replace")
    return parse_history(name or run.resolve().name, text)


def parse_history(name: str, text: str) -> History:
    """Return the columns of the text of a metrics.jsonl."""
    columns: dict[str, dict[int, float]] = {}
    samples: dict[int, str] = {}
    final: dict[str, float] = {}
    skipped, finished = 0, False
    for line in read_metrics(text):
        step = line.pop("step")
        finished = line.pop("final", False) is True
        if finished:
            numbers = {k: v for k, v in line.items() if isinstance(v, (int, float))}
            final = {k: v for k, v in numbers.items() if not k.startswith(PART_PREFIX)}
            parts = {
                k.removeprefix(PART_PREFIX): v
                for k, v in numbers.items()
                if k.startswith(PART_PREFIX)
            }
            line = final | parts
        skipped += "skipped" in line
        if isinstance(sample := line.pop("sample", None), str):
            samples[step] = sample
        for key, value in line.items():
            if isinstance(value, (int, float)):
                columns.setdefault(key, {})[step] = float(value)
    unit = next((unit for unit in UNITS if unit in columns), UNITS[0])
    counted, speeds = columns.get(unit, {}), columns.get(f"{unit}_per_second", {})
    seconds, spent = {}, 0.0
    for step in sorted(step for step in counted if speeds.get(step, 0) > 0):
        # where the line before is lost, a step has the mean of those so far
        before = counted.get(step - 1, counted[step] * (1 - 1 / step))
        spent += (counted[step] - before) / speeds[step]
        seconds[step] = spent
    return History(name, unit, columns, final, samples, skipped, finished, seconds)


def read_metrics(text: str) -> list[dict[str, Any]]:
    """Return the objects in the text of a metrics.jsonl, without a truncated line."""
    lines = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line, parse_int=_parse_int)
            if isinstance(value, dict) and type(value.get("step")) is int and value["step"] > 0:
                lines.append(value)
    return lines


def _parse_int(digits: str) -> int | float:
    """Return a number, as a float if it has more digits than any count."""
    return int(digits) if len(digits) < 19 else float(digits)


PROJECT = "tiedgpt"
Log = Callable[[dict[str, float], dict[str, str], int], None]
"""Function of the numbers, the texts and the number of a step."""
Start = Callable[[Path, Mapping[str, Any], int], tuple[Log, Callable[[], None]]]
"""Function of (run, tables, step) that begins or resumes a run; returns `log` and `finish`."""


def open_tracker(name: TrackerName) -> Start:
    """Return the function that begins a run of a tracker; `UserError` if its package is missing.

    trackio stores the data on this machine (`trackio show --project tiedgpt`), Weights & Biases
    follows its own settings, and TensorBoard's files are in the run's directory.
    """
    try:
        package: Any = import_module(name)
        if getattr(package, "__file__", None) is None:
            raise ImportError("only a folder of that name is here")
    except ImportError as error:
        raise UserError(
            f"--track {name} needs the package {name} ({error})", hint=f"pip install {name}"
        ) from None

    def start(run: Path, tables: Mapping[str, Any], step: int) -> tuple[Log, Callable[[], None]]:
        names: dict[str, Any] = {"id": _identity(run), "name": run.name}
        if name == "trackio":  # which knows a run by its name
            names = {"name": f"{run.name}-{_identity(run)}", "embed": False}
        package.init(project=PROJECT, config=_flat(tables), resume="allow", **names)
        return lambda values, texts, step: package.log(
            {**values, **texts}, step=step
        ), package.finish

    return _start_tensorboard if name == "tensorboard" else start


def _start_tensorboard(
    run: Path, tables: Mapping[str, Any], step: int
) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    # what an earlier call wrote of later steps is not shown
    writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
    rows = "".join(f"    {name} = {value}\n" for name, value in _flat(tables).items())
    writer.add_text("run.toml", rows, global_step=step + 1)

    def log(values: dict[str, float], texts: dict[str, str], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, global_step=step)
        for name, text in texts.items():
            writer.add_text(name, text, global_step=step)

    return log, writer.close


class Tracking:
    """Send a run's metrics to a tracker until it fails; a context manager.

    The tracker begins with the first line and is finished when the context ends.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        run: Path,
        tables: Mapping[str, Any],
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._name, self._warn = name, warn
        self._start = functools.partial(start, run, tables)
        self._log: Log | None = None
        self._finish: Callable[[], None] = lambda: None

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        with self._report_failure():
            self._finish()

    def log(self, line: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        with self._report_failure():
            if self._log is None:
                self._log, self._finish = self._start(line["step"] - 1)
            self._log(*split_line(line), line["step"])

    @contextlib.contextmanager
    def _report_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a foreign package raises, training goes on
            self._log, self._finish = (lambda *_: None), (lambda: None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._warn(f"{self._name} failed and is given no more metrics ({reason})")


def split_line(line: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the finite numbers and the texts of a line."""
    values = {
        key: float(value)
        for key, value in line.items()
        if key not in ("step", "final") and isinstance(value, (int, float)) and math.isfinite(value)
    }
    return values, {key: value for key, value in line.items() if isinstance(value, str)}


def _identity(run: Path) -> str:
    """Return an id of the run in this directory, which stays when it resumes."""
    record = run / "run.toml"
    text = record.read_bytes() if record.exists() else b""
    return hashlib.sha256(str(run.resolve()).encode() + text).hexdigest()[:12]


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables as one table, with names like training.lr."""
    return {
        f"{table}.{key}": value if isinstance(value, (int, float, str, bool)) else str(value)
        for table, entries in tables.items()
        for key, value in entries.items()
    }
