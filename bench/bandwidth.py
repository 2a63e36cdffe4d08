"""How fast this machine reads memory: the limit of decoding one sequence.

    python bench/bandwidth.py [--threads 2]

A vectorised sum over one gigabyte, a part of it to each thread, the best of some readings.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

BYTES = 1 << 30


@njit(nogil=True, cache=True)
def total(numbers):
    """Return the sum of (n,) int64; the compiler makes several of it, side by side."""
    found = np.int64(0)
    for at in range(len(numbers)):
        found += numbers[at]
    return found


class Bandwidth:
    """Memory to be read; called, it returns bytes a second."""

    def __init__(self, threads: int) -> None:
        self._parts = [np.ones(BYTES // threads // 8, np.int64) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self()

    def __call__(self, times: int = 3) -> float:
        """Read everything some times; return the best."""
        best = 0.0
        for _ in range(times):
            began = time.perf_counter()
            list(self._pool.map(total, self._parts))
            best = max(best, BYTES / (time.perf_counter() - began))
        return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    print(f"{Bandwidth(parser.parse_args().threads)(20) / 1e9:.1f} GB/s")
