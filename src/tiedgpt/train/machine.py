"""The machine that trains: its device, its memory and its load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tiedgpt.runtime import count_cores, has_bf16
from tiedgpt.train.plan.values import Dtype

BUSY_PROCESSES = 0.5
"""A machine is busy if its running processes exceed its cores by more than this number."""
LIBRARY_BYTES = 60_000_000
"""Memory of the libraries that the first step loads."""


def choose_dtype(device: torch.device) -> Dtype:
    """Return the dtype of matmuls: bf16 where the device computes in it. The load has no effect."""
    return "bf16" if has_bf16(device) else "fp32"


def used_memory(device: torch.device) -> int:
    """Return the bytes that this process holds on the device, or 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def measure_load() -> float | None:
    """Return the number of processes that want to run if it exceeds the cores, else None."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load > count_cores() + BUSY_PROCESSES else None


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
