"""Compare our losses, forward and backward, with cross-entropy on the full logits.

    python bench/loss.py [--positions 2048] [--rounds 7]

V = 50,257, D = 768, fp32 by default. Two losses are ours: the single pass of `fast_training`, and
the chunks of `model.loss`. Torch's chunked loss is included if torch has one. Time: all losses take
turns in one process; the results are medians of the ratios to plain cross-entropy. Memory: each
loss runs in a fresh process; the result is the peak above the weights, the hidden states and the
accumulated gradients before the call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tiedgpt.core.loss import chunk_rows, chunked_cross_entropy
from tiedgpt.train.step.fast.loss import one_pass_cross_entropy

VOCAB, WIDTH = 50257, 768


def chunked(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    n_rows = chunk_rows(len(h), VOCAB, h.dtype)
    return chunked_cross_entropy(h, targets, lambda rows: F.linear(rows, w), n_rows)


def plain(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float(), targets)


def torchs(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Torch's own loss in chunks (2.13 on), at the chunk that was fastest of 256, 512, 1024."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512)
    return F.linear_cross_entropy(h, w, targets, options=options)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one pass": one_pass_cross_entropy,
    "chunked": chunked,
    "plain": plain,
}
if hasattr(F, "linear_cross_entropy"):
    WAYS["torch's"] = torchs


def inputs(positions: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    h = torch.randn(positions, WIDTH, requires_grad=True)
    w = (0.02 * torch.randn(VOCAB, WIDTH)).requires_grad_()
    return h, w, torch.randint(VOCAB, (positions,))


def once(way: str, data: tuple[Tensor, Tensor, Tensor], autocast: bool) -> float:
    h, w, _ = data
    h.grad = w.grad = None
    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = WAYS[way](*data)
    loss.backward()
    return time.perf_counter() - began


def peak_megabytes(way: str, positions: int, autocast: bool) -> float:
    """Run this file anew for one way; return its peak memory above its start in MB."""
    command = [sys.executable, __file__, "--alone", way, "--positions", str(positions)]
    command += ["--bf16"] if autocast else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def alone(way: str, positions: int, autocast: bool) -> None:
    data = inputs(positions)
    small = torch.randn(8, 8, requires_grad=True)
    once_small = F.cross_entropy(small @ small, torch.zeros(8, dtype=torch.long))
    once_small.backward()  # the thread pools and the libraries are there now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = kilobytes("VmRSS")
    once(way, data, autocast)
    print((kilobytes("VmHWM") - before) / 1024)


def kilobytes(field: str) -> int:
    """Return a line of /proc/self/status (Linux; getrusage would count the parent's peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="products in bf16 under autocast")
    parser.add_argument("--alone", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        alone(args.alone, args.positions, args.bf16)
        return
    data = inputs(args.positions)
    for way in WAYS:
        once(way, data, args.bf16)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            seconds[way].append(once(way, data, args.bf16))
    ratios = {
        way: statistics.median(a / b for a, b in zip(times, seconds["plain"], strict=True))
        for way, times in seconds.items()
    }
    memory = {way: peak_megabytes(way, args.positions, args.bf16) for way in WAYS}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "positions": args.positions,
        "products": "bf16" if args.bf16 else "fp32",
        "seconds": {way: round(statistics.median(times), 3) for way, times in seconds.items()},
        "time ratios (medians of ratios)": {way: round(r, 3) for way, r in ratios.items()},
        "peak MB": {way: round(value) for way, value in memory.items()},
        "memory ratios": {way: round(mb / memory["plain"], 3) for way, mb in memory.items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
