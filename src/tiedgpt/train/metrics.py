"""metrics.jsonl: its lines as columns, and handed to a tracker as they are written. No torch.

A tracker (trackio, Weights & Biases, TensorBoard) has a thread of its own, behind a queue, so it
cannot stop or slow training. If it raises, one line says so, and it is given nothing more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tiedgpt.errors import UserError
from tiedgpt.files import missing_run
from tiedgpt.train.options import TrackerName

Axis = Literal["tokens", "steps", "seconds"]
UNITS = ("tokens", "examples")
PART = "part_"
"""How keys begin of the last evaluation on that part which the others were on."""


@dataclass(frozen=True)
class History:
    """A run's metrics. A line that a crash or a running training cut is left out."""

    name: str
    unit: str
    """What is counted: tokens, examples."""
    columns: dict[str, dict[int, float]]
    """By key of metrics.jsonl and by step; evaluations, the last too, are of the same part."""
    final: dict[str, float]
    """The last evaluation, of all that is held out; {} before it."""
    samples: dict[int, str]
    """What the model did at a step, by step."""
    skipped: int
    """Steps that changed nothing, because their loss or gradient was not finite."""
    finished: bool
    _seconds: dict[int, float] = field(repr=False, default_factory=dict)

    @property
    def step(self) -> int:
        """The last step there is a line of; 0 without any."""
        return max((max(column) for column in self.columns.values() if column), default=0)

    @property
    def seconds(self) -> float:
        """Seconds spent in steps; evaluations and checkpoints are not counted."""
        return max(self._seconds.values(), default=0.0)

    @property
    def units(self) -> int:
        """Tokens, or examples, trained on."""
        return int(max(self.columns.get(self.unit, {}).values(), default=0))

    def last(self, key: str) -> float | None:
        """Return the newest value of a key, of all that is held out where there is one."""
        if key in self.final:
            return self.final[key]
        column = self.columns.get(key)
        return column[max(column)] if column else None

    def series(self, key: str, axis: Axis) -> tuple[list[float], list[float]]:
        """Return (places on the axis, values) of a key; `tokens` means examples where they are."""
        column = self.columns.get(key, {})
        if axis == "steps":
            places = {step: float(step) for step in column}
        else:
            places = self._seconds if axis == "seconds" else self.columns.get(self.unit, {})
        pairs = [(places[step], y) for step, y in sorted(column.items()) if step in places]
        return [x for x, _ in pairs], [y for _, y in pairs]


def read_history(run: Path, name: str | None = None) -> History:
    """Read a run's metrics.jsonl, also while the run is being trained.

    Raises `UserError` where there is none.
    """
    path = run / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        missing = None if run.exists() else missing_run(run)
        raise missing or UserError(
            f"{run} has no metrics.jsonl", hint="name a run's directory (runs/...), or train first"
        ) from None
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
            final = {k: v for k, v in numbers.items() if not k.startswith(PART)}
            parts = {k.removeprefix(PART): v for k, v in numbers.items() if k.startswith(PART)}
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
    """Return the objects in the text of a metrics.jsonl, without what a crash cut off."""
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and type(value.get("step")) is int:
                found.append(value)
    return found


PROJECT = "tiedgpt"
QUEUE = 10_000
"""Lines that wait for a slow tracker at the most."""
PATIENCE = 20.0
"""Seconds that the end of training waits for a tracker."""

Log = Callable[[dict[str, float], dict[str, str], int], None]
"""Takes the numbers, the texts and the number of a step."""
Start = Callable[[Path, Mapping[str, Any], int], tuple[Log, Callable[[], None]]]
"""Begins a run, or resumes it after a step, with run.toml's tables; returns `log` and `finish`."""


def open_tracker(name: TrackerName) -> Start:
    """Return what begins a run of that tracker; `UserError` if its package is missing.

    trackio keeps the data on this machine (`trackio show --project tiedgpt`), Weights & Biases goes
    by its own settings, TensorBoard's files are in the run's directory.
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
        own: dict[str, Any] = {"id": _identity(run), "name": run.name}
        if name == "trackio":  # which knows a run by its name
            own = {"name": f"{run.name}-{_identity(run)}", "embed": False}
        package.init(project=PROJECT, config=_flat(tables), resume="allow", **own)
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
    """Hands a run's lines of metrics to a tracker, as a context: begun and finished with it."""

    def __init__(
        self,
        name: str,
        start: Start,
        run: Path,
        tables: Mapping[str, Any],
        *,
        warn: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:
        self._name, self._warn, self._patience = name, warn, patience
        self._start: Callable[[int], Any] = lambda step: start(run, tables, step)
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(QUEUE)
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._dropped = False

    def __enter__(self) -> Tracking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._lines.put_nowait(None)
            self._thread.join(self._patience)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._warn(f"{self._name} is not done after {self._patience:g} s: left to itself")

    def log(self, line: Mapping[str, Any]) -> None:
        """Hand over a line of metrics.jsonl, now or never."""
        try:
            self._lines.put_nowait(dict(line))
        except queue.Full:
            if not self._dropped and self._thread.is_alive():
                self._warn(f"{self._name} is too slow: some metrics are not tracked")
            self._dropped = True

    def _work(self) -> None:
        try:
            log: Log | None = None
            while (line := self._lines.get()) is not None:
                if log is None:
                    log, finish = self._start(line["step"] - 1)
                log(*split_line(line), line["step"])
            if log is not None:
                finish()
        except BaseException as error:  # whatever a foreign package does, training goes on
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self._warn(f"{self._name} failed and is given no more metrics ({why[:200]})")


def split_line(line: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return what a tracker is told of a line: its finite numbers, its texts."""
    values = {
        key: float(value)
        for key, value in line.items()
        if key not in ("step", "final") and isinstance(value, (int, float)) and math.isfinite(value)
    }
    return values, {key: value for key, value in line.items() if isinstance(value, str)}


def _identity(run: Path) -> str:
    """Return letters that are the same whenever the run in this directory goes on."""
    record = run / "run.toml"
    text = record.read_bytes() if record.exists() else b""
    return hashlib.sha256(str(run.resolve()).encode() + text).hexdigest()[:12]


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables as one, with names like training.lr."""
    return {
        f"{table}.{key}": value if isinstance(value, (int, float, str, bool)) else str(value)
        for table, entries in tables.items()
        for key, value in entries.items()
    }
