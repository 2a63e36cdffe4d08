"""Run one engine in a separate process, to measure the memory of the whole process.

python bench/alone.py WAY MODELS SIZE CAPACITY THREADS     (called by `turns.peak_megabytes`)
"""

from __future__ import annotations

import sys
from pathlib import Path

from formats import Files
from peers import open_way
from ways import Room


def print_peak(name: str, directory: str, size: str, capacity: str, threads: str) -> None:
    """Read 512 ids and decode 32 with one way; print this process's peak memory in MB (Linux)."""
    way = open_way(name, Files(Path(directory), size, None), Room(1, int(capacity), int(threads)))
    way([[7919 * at % 50_000 for at in range(512)]], 32)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024)


if __name__ == "__main__":
    print_peak(*sys.argv[1:])
