"""The directory of a run, and its record in run.toml. No torch.

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
import platform
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tiedgpt
from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import (
    PREPARED,
    lock_file,
    reading,
    remove,
    remove_leftovers,
    replacing,
    sync,
    writing,
)
from tiedgpt.runtime import count_cores
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.store.metrics import read_metrics

GOES_ON = "goes_on"
"""Key of the line after which a finished run was prolonged."""


class RunDirectory:
    """The paths of a run, its record and its metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.tokenizer = path / "tokenizer"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.record = path / "run.toml"
        self.lock_file = path / ".lock"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory inside the block; `UserError` if another training has it.

        Files of an attempt without a first step are removed, before the block and after it.
        """
        with writing(self.path):
            existed = self.path.exists()
            if existed and not self.path.is_dir():
                raise UserError(f"{self.path} is a file", hint="give --out a directory")
            marks = (self.lock_file, self.record, self.data / PREPARED)
            a_run = any(path.exists() for path in marks)
            if existed and not a_run and any(self.path.iterdir()):
                raise UserError(
                    f"{self.path} exists and contains no training run",
                    hint="give --out another directory",
                )
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self.lock_file.open("a+")
        with lock:
            if not lock_file(lock):
                lock.seek(0)
                raise UserError(
                    f"{self.path} is in use: process {lock.read().strip() or 'unknown'} is "
                    "training in it",
                    hint="wait for it or give another --out",
                )
            try:
                is_current = os.path.samestat(os.fstat(lock.fileno()), self.lock_file.stat())
            except FileNotFoundError:
                is_current = False
            if not is_current:  # its former owner has just removed it
                raise UserError(f"another training was just leaving {self.path}", hint="try again")
            with writing(self.lock_file):
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
                    self.lock_file.unlink(missing_ok=True)
                    if not existed:
                        with contextlib.suppress(OSError):  # something else was put there
                            self.path.rmdir()

    def is_in_use(self) -> bool:
        """Return whether another process is training in it."""
        try:
            with self.lock_file.open("a+") as lock:
                return not lock_file(lock)
        except OSError:
            return True

    def _clear_unless_planned(self) -> None:
        """Remove the tokenizer and the data of an attempt without run.toml.

        Prepared data record their options, and are kept: they may have taken hours.
        """
        if self.record.exists():
            return
        if any(self.checkpoints.glob("step-*")):
            raise CorruptInputError(
                f"{self.path} has checkpoints and no run.toml that describes them",
                hint="give another --out",
            )
        remove(self.tokenizer)
        if not (self.data / PREPARED).exists():
            remove(self.data)

    def is_finished(self) -> bool:
        """Return whether the run has its final line, its last checkpoint and its model.

        A plan that begins at the last step prolongs the run.
        """
        latest, lines = self.checkpoints / "latest", self.read_metrics()
        if not (latest.exists() and (self.model / "config.json").exists() and lines):
            return False
        last_step = lines[-1]["step"]
        last = checkpoint_path(self.checkpoints, last_step).name
        with reading(latest, "text"):
            is_saved = latest.read_text(errors="replace").strip() == last
        since = self.read_record().get("training", {}).get("since", 0)
        return "final" in lines[-1] and is_saved and since != last_step

    def write_record(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Write run.toml."""
        with replacing(self.record) as temporary:
            temporary.write_text(format_toml(tables), encoding="utf-8")

    def read_record(self) -> dict[str, Any]:
        """Return run.toml's tables; {} before the first step was planned."""
        with reading(self.record, "record of a run", hint="give another --out"):
            if not self.record.exists():
                return {}
            tables = tomllib.loads(self.record.read_text(encoding="utf-8"))
            if not tables or not all(isinstance(table, dict) for table in tables.values()):
                raise ValueError("it has no tables")
        return tables

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without a truncated one."""
        with reading(self.metrics, "metrics of a run"):
            if not self.metrics.exists():
                return []
            return read_metrics(self.metrics.read_text(encoding="utf-8", errors="replace"))

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def sync_metrics(self) -> None:
        """Sync the lines to the disk, before a checkpoint is written."""
        if self.metrics.exists():
            with writing(self.metrics):
                sync(self.metrics)

    def cut_metrics(self, step: int, keys: Iterable[str] = ()) -> None:
        """Drop the lines after `step`, the final line, and lines of `step` with one of the keys."""
        if self.metrics.exists():
            lines = [line for line in self.read_metrics() if line["step"] <= step]
            dropped = {"final", *keys}
            lines = [line for line in lines if line["step"] < step or not dropped & line.keys()]
            with replacing(self.metrics) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return directory / f"step-{step:06d}"


def make_record(
    options: RunOptions,
    config: GPTConfig,
    plan: Plan,
    counts: Mapping[str, dict[str, Any]],
    text_digest: str | None = None,
    processes: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the tables of run.toml; `counts` are the tables of the data."""
    import torch

    return {
        "options": options.record(),
        "model": asdict(config),
        **plan_tables(plan),
        "text": {"sha256": text_digest},
        **counts,
        **({"processes": processes} if processes else {}),
        "machine": describe_machine(),
        "versions": {
            "tiedgpt": tiedgpt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        },
    }


def describe_machine() -> dict[str, Any]:
    """Return facts about the hardware for run.toml."""
    import torch

    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name\s*: *(.+)", text, re.MULTILINE)
    facts: dict[str, Any] = {
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": count_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def plan_tables(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the table of run.toml that holds a plan."""
    return {"training": asdict(plan)}


def read_plan(tables: dict[str, Any]) -> tuple[GPTConfig, Plan]:
    """Return the config and the plan that `make_record` made."""
    try:
        return GPTConfig(**tables["model"]), Plan(**tables["training"])
    except (KeyError, TypeError, TiedGPTError) as error:
        wrote = tables.get("versions", {}).get("tiedgpt", "unknown")
        raise CorruptInputError(
            f"run.toml is damaged or of another edition (tiedgpt {wrote} wrote it, this is "
            f"{tiedgpt.__version__}): {error}",
            hint="give another --out, with --start DIRECTORY/model to begin with its model",
        ) from None


def format_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of plain values as TOML; None is left out."""
    parts = []
    for name, table in tables.items():
        lines = [
            f"{key} = {_format_value(value)}" for key, value in table.items() if value is not None
        ]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
