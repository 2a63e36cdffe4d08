"""A run's directory: one process at a time in it, its record in run.toml, its metrics a line each.

model/            the trained model, a Hugging Face directory with its tokenizer
tokenizer/        the tokenizer, made before the first step
data/             token shards
checkpoints/      step-NNNNNN/ and `latest`
metrics.jsonl     a line a step, and a line an evaluation
run.toml          everything needed to run it again
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import remove, remove_leftovers, replacing, sync, writing
from tiedgpt.train.history import PART, metric_lines

GOES_ON = "goes_on"
"""The key of the line after which a run went on that had ended."""

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class RunDirectory:
    """The paths of a run, and what is read and written line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.tokenizer = path / "tokenizer"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.record = path / "run.toml"
        self.lock = path / ".lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings out while the block runs; `UserError` if one is in it already.

        What an attempt left that never came to its first step is cleared away, before the block
        and after it.
        """
        with writing(self.path):
            existed = self.path.exists()
            if existed and not self.path.is_dir():
                raise UserError(f"{self.path} is a file", hint="give --out a directory")
            a_run = self.lock.exists() or self.record.exists()
            if existed and not a_run and any(self.path.iterdir()):
                raise UserError(
                    f"{self.path} is not empty and is no run", hint="give --out another directory"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self.lock.open("a+")
        with lock:
            if not _flock(lock):
                lock.seek(0)
                raise UserError(
                    f"{self.path} is in use: process {lock.read().strip() or 'unknown'} is "
                    "training in it",
                    hint="wait for it or give another --out",
                )
            if not _is_at(lock, self.lock):  # who had it has just removed it
                raise UserError(f"{self.path} was being left by another training", hint="try again")
            with writing(self.lock):
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
            self._clear_unless_planned()
            for directory in (self.path, self.checkpoints, self.model, self.tokenizer):
                remove_leftovers(directory)
            try:
                yield
            finally:
                if not self.record.exists():
                    self._clear_unless_planned()
                    self.lock.unlink(missing_ok=True)
                    if not existed:
                        with contextlib.suppress(OSError):  # something else was put there
                            self.path.rmdir()

    def in_use(self) -> bool:
        """Whether a training is in it now."""
        try:
            with self.lock.open("a+") as lock:
                return not _flock(lock)
        except OSError:
            return True

    def _clear_unless_planned(self) -> None:
        """Without run.toml there was no first step, and data may be of other options."""
        if self.record.exists():
            return
        if any(self.checkpoints.glob("step-*")):
            raise CorruptInputError(
                f"{self.path} has checkpoints and no run.toml that says of what",
                hint="give another --out",
            )
        for path in (self.data, self.tokenizer):
            remove(path)

    def finished(self) -> bool:
        """Whether the last step was done, whichever that was, and the model was written."""
        latest, lines = self.checkpoints / "latest", self.metric_lines()
        if not (latest.exists() and (self.model / "config.json").exists() and lines):
            return False
        name = f"step-{lines[-1]['step']:06d}"
        return "final" in lines[-1] and latest.read_text(errors="replace").strip() == name

    def reopen(self) -> int:
        """Let a run that is finished go on; return its last step.

        Its last line becomes that of an evaluation like the others.
        """
        *lines, last = self.metric_lines()
        score = {k.removeprefix(PART): v for k, v in last.items() if k.startswith(PART)}
        goes_on = {GOES_ON: "by a plan of more steps"}
        self._replace_metrics([*lines, {"step": last["step"], **score, **goes_on}])
        return int(last["step"])

    def reopened(self, step: int) -> float | None:
        """Return the validation loss of a run that ended after `step` and goes on; else None."""
        lines = (line for line in self.metric_lines() if GOES_ON in line)
        return next((line.get("val_loss") for line in lines if line["step"] == step), None)

    def write_record(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Write run.toml."""
        with replacing(self.record) as temporary:
            temporary.write_text(toml(tables), encoding="utf-8")

    def read_record(self) -> dict[str, Any]:
        """Return run.toml's tables; {} before the first step was planned."""
        try:
            tables = tomllib.loads(self.record.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise CorruptInputError(f"{self.record} is damaged: {error}") from None
        if not tables or not all(isinstance(table, dict) for table in tables.values()):
            raise CorruptInputError(f"{self.record} is damaged", hint="give another --out")
        return tables

    def metric_lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far, without what a crash cut off."""
        if not self.metrics.exists():
            return []
        return metric_lines(self.metrics.read_text(encoding="utf-8", errors="replace"))

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def sync_metrics(self) -> None:
        """Have the disk hold the lines so far: no checkpoint is to be newer than they are."""
        if self.metrics.exists():
            with writing(self.metrics):
                sync(self.metrics)

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after `step`, which are about to be written again."""
        if self.metrics.exists():
            self._replace_metrics([line for line in self.metric_lines() if line["step"] <= step])

    def _replace_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with replacing(self.metrics) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def _flock(file: IO[str]) -> bool:
    """Lock an open file until it is closed; return whether nobody else had it locked."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return fcntl is None


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of plain values as TOML; None is left out."""
    parts = []
    for name, table in tables.items():
        lines = [
            f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None
        ]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
