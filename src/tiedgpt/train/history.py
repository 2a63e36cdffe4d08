"""metrics.jsonl as columns: what a plot, a comparison and a model card are made of. No torch."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tiedgpt.errors import UserError

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
        """Return the newest value of a key, of all that is held out where there is such a one."""
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
        raise UserError(
            f"{run} has no metrics.jsonl", hint="name a run's directory (runs/...), or train first"
        ) from None
    return history(name or run.resolve().name, text)


def history(name: str, text: str) -> History:
    """Return the columns of the text of a metrics.jsonl."""
    columns: dict[str, dict[int, float]] = {}
    samples: dict[int, str] = {}
    final: dict[str, float] = {}
    skipped, finished = 0, False
    for line in metric_lines(text):
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


def metric_lines(text: str) -> list[dict[str, Any]]:
    """Return the objects in the text of a metrics.jsonl, without what a crash cut off."""
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and type(value.get("step")) is int:
                found.append(value)
    return found
