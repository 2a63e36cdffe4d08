"""Measurements in rounds: each engine takes one turn in each round; their rows and results."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from formats import Files
from ways import Room

RESULTS = Path(__file__).parent / "results"
PEERS = ("llama-cpp-python", "ctranslate2", "onnxruntime", "transformers", "torch", "numba")
PAUSE = 0.2
"""Seconds between turns, for the threads of the last one to fall asleep."""
FLASH = " flash"

Times = dict[str, list[float]]


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Call each function once to warm up, then once a round; return their results."""
    found: Times = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            gc.collect()
            time.sleep(PAUSE)
            value = way()
            if number:
                found[name].append(value)
    return found


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many other processes computing inside the block."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def better_flash(seconds: Times) -> Times:
    """Keep the faster of the two variants, with and without flash attention."""
    kept = dict(seconds)
    for name in seconds:
        plain = name.removesuffix(FLASH)
        if plain != name and plain in seconds:
            slower = max(plain, name, key=lambda n: statistics.median(seconds[n]))
            del kept[slower]
    return kept


def faster_by(seconds: Times, of: str) -> dict[str, float]:
    """Return the median over rounds of each way's seconds over those of `of`."""
    return {
        name: round(statistics.median(b / a for a, b in zip(seconds[of], times, strict=True)), 2)
        for name, times in seconds.items()
        if name != of
    }


def per_second(seconds: Times, count: int) -> dict[str, float]:
    """Return the median rate of each, of `count` things a turn."""
    return {name: round(count / statistics.median(times), 1) for name, times in seconds.items()}


def prompts(n: int, length: int) -> list[list[int]]:
    """Return n different lists of ids, the same in every run."""
    return [[(31 * slot + 7919 * at) % 50_000 for at in range(length)] for slot in range(n)]


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the first fields of a row: the day, the machine, the versions, the model."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {processor()}, {os.cpu_count()} cores",
        "threads": args.threads,
        "cpu class": getattr(args, "cpu_class", "native"),
        "versions": {name: found for name in PEERS if (found := version(name))},
        "model": f"{args.size}, random weights",
        "rounds": args.rounds,
    }


def version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the processor's name and the widest products that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    about = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    flags = about.get("flags", "").split()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni") if flag in flags]
    return " ".join([about.get("model name", platform.processor()), *wide])


def keep(name: str, row: Mapping[str, Any], quick: bool) -> None:
    """Append a row to `results/NAME-DATE.jsonl`; a quick run's is only shown."""
    if quick:
        return
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}-{row['date']}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def show(title: str, rows: Mapping[str, Iterable[Any]], columns: Iterable[str]) -> None:
    """Print a table: a line for each way."""
    heads = list(columns)
    print(f"\n{title}\n{'':28}" + "".join(f"{head:>18}" for head in heads))
    for name, cells in rows.items():
        print(f"{name:28}" + "".join(f"{'-' if cell is None else cell!s:>18}" for cell in cells))


def peak_megabytes(name: str, files: Files, room: Room) -> int:
    """Decode with one engine in a fresh process; return the peak memory of the process."""
    command = [sys.executable, str(Path(__file__).with_name("alone.py")), name]
    command += [str(files.directory), files.size, str(room.capacity), str(room.threads)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return round(float(ran.stdout.split()[-1]))
