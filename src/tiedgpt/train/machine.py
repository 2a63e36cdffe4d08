"""The machine that trains: its name for the record, its peak, its memory."""

from __future__ import annotations

import functools
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 products a second, by NVIDIA's data sheets; the first name that fits is taken."""


@functools.lru_cache
def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the most operations a second: NVIDIA's figure, or on a CPU what a product reaches.

    None where it is not known.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for part, peak in PEAKS.items() if part in name]
        return known[0] if known and dtype == "bf16" else None
    n = 1024
    x = torch.ones(n, n, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, device=device)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        F.linear(x, x)
        seconds.append(time.perf_counter() - began)
    return 2.0 * n**3 / min(seconds)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes this process has held on the device, or None where none can tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe() -> dict[str, Any]:
    """Return what a run's record tells of the hardware."""
    affinity = getattr(os, "sched_getaffinity", None)
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
