"""Whole commands in processes that cost little to start, to be killed or to have a failing disk.

A server that has imported everything and measured the machine is forked for each command.
"""

import builtins
import errno
import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._dynamo  # which the optimizers import when they are made

import tiedgpt.cli.main
import tiedgpt.cli.show_training
import tiedgpt.cli.train
import tiedgpt.train.run
import tiedgpt.train.tasks.texts
from tests.train.conftest import CPU, metrics, reopen_trial
from tiedgpt.train.step.measures import peak_flops
from tiedgpt.train.store.checkpoint import list_checkpoints, verify
from tiedgpt.train.store.directory import RunDirectory

peak_flops(CPU, "fp32")  # which a process measures once, here with the one thread of conftest.py
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "huggingface_hub.repocard", "tests.models", __name__])


KILLED = -9
"""Exit code of a command that was killed."""


def operations(run: Path) -> list[str]:
    """Return the operations under a run's directory that a `Fault` listed."""
    return Path(f"{run}.operations").read_text().splitlines()


class Command:
    """`tiedgpt train ... --out RUN` in a new process; without arguments, the bare loop.

    Another verb that has --out may take the place of `train`.

    The loop goes on in a run that has a record already.
    """

    def __init__(
        self,
        run: Path,
        arguments: Sequence[str | Path] = (),
        *,
        fault: "Fault | None" = None,
        name: str = "first",
        verb: Sequence[str] = ("train",),
    ) -> None:
        self.log = run.with_name(f"{run.name}-{name}.log")
        whole = [*verb, *map(str, arguments), "--out", str(run)] if arguments else []
        self._process = SERVER.Process(target=_main, args=(whole, run, self.log, fault))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code, or None while it runs; killed is -9."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nothing is told."""
        self._process.kill()
        self._process.join()

    def output(self) -> str:
        """Return its stdout and stderr."""
        return self.log.read_text(errors="replace")


def _main(arguments: list[str], run: Path, log: Path, fault: "Fault | None") -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    torch.set_num_threads(1)
    if fault is not None:
        fault(run)
    if not arguments:
        tiedgpt.cli.train.run = lambda _arguments: _loop(RunDirectory(run))
    sys.exit(tiedgpt.cli.main.main(arguments or ["train"]))


def _loop(run: RunDirectory) -> int:
    with run.lock():
        if not run.is_finished():
            for event in reopen_trial(run.path).train():
                print(*getattr(event, "notes", []), sep="\n")
    return 0


class Fault:
    """At the operation of this number under the run's directory, be killed or fail.

    Operations are: to open, to write (before a file's first, and in its middle), to sync, to
    rename, to delete, to make a directory. They are listed, from 0, in a file beside the run.
    """

    def __init__(self, at: int | None, *, error: int | None = None, lasting: bool = False) -> None:
        self.at, self.error, self.lasting = at, error, lasting
        self.seen: list[str] = []

    def __call__(self, run: Path) -> None:
        """Patch this process."""
        self.run = str(run)
        self.counter = open(f"{run}.operations", "w")
        opened, os_open = io.open, os.open

        def watched_open(path, mode="r", *rest, **options):
            if not self._ours(path):
                return opened(path, mode, *rest, **options)
            writes = bool(set(mode) & set("wax+"))
            self._operation(f"open {mode} {path}", writes)
            file = opened(path, mode, *rest, **options)
            return _Watched(file, lambda what: self._operation(f"{what} {path}", True))

        def watched_os_open(path, flags, *rest, **options):
            if self._ours(path):
                self._operation(f"open {path}", False)
            return os_open(path, flags, *rest, **options)

        builtins.open = io.open = watched_open
        os.open = watched_os_open
        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync"):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _ours(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.run + "/")

    def _watched(self, name: str, function: Callable) -> Callable:
        def watched(path, *rest, **options):
            if name == "fsync" or self._ours(path) or "dir_fd" in options:
                self._operation(f"{name} {path}", name not in ("unlink", "remove", "rmdir"))
            return function(path, *rest, **options)

        return watched

    def _operation(self, what: str, takes_room: bool) -> None:
        number = len(self.seen)
        self.seen.append(what)
        self.counter.write(what + "\n")
        self.counter.flush()
        if self.at is None or not (number == self.at or (self.lasting and number > self.at)):
            return
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if takes_room or self.error != errno.ENOSPC:
            raise OSError(self.error, os.strerror(self.error), self.run)


class _Watched:
    """A file whose writes are operations; half of the data are written first."""

    def __init__(self, file, operation: Callable[[str], None]) -> None:
        self._file, self._operation, self._begun = file, operation, False

    def write(self, data) -> int:
        if self._begun:
            return self._file.write(data)
        self._begun = True
        self._operation("write")
        half = len(data) // 2
        done = self._file.write(data[:half])
        self._file.flush()
        self._operation("write the rest of")
        return done + self._file.write(data[half:])

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self):
        return iter(self._file)


def left(run: Path) -> dict[str, str]:
    """Return sums of everything that a run left, without what tells of machine and moment."""
    files = [*(run / "model").glob("*.safetensors"), *(run / "data").iterdir()]
    files += [run / "checkpoints" / "latest", *(run / "tokenizer").iterdir()]
    sums = {str(file.relative_to(run)): file.read_bytes() for file in sorted(files)}
    sums["metrics.jsonl"] = json.dumps(metrics(run)).encode()
    newest = list_checkpoints(run / "checkpoints")[-1]
    manifest = verify(newest)
    known = {name: identity["sha256"] for name, identity in manifest.items()}
    for shard in (newest / name for name in manifest if name.startswith("shard-")):
        known[shard.name] = without_order(shard)
    return known | {name: hashlib.sha256(data).hexdigest() for name, data in sums.items()}


def without_order(file: Path) -> str:
    """Return a sum of a safetensors file that does not depend on the order of its metadata."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:start]), sort_keys=True)
    return hashlib.sha256(header.encode() + data[start:]).hexdigest()
