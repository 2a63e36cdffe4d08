"""Banded attention against dense causal attention and a T x T mask, forward and backward, fp32.

    python bench/bands.py [--positions 2048] [--rounds 7]

Two sequences of 12 heads of 64; all in turn, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tiedgpt.core.layers import banded_attention

WINDOWS = (64, 128, 256, 512)


def once(attend: Callable[[Tensor, Tensor, Tensor], Tensor], length: int) -> float:
    q, k, v = (torch.randn(2, 12, length, 64, requires_grad=True) for _ in range(3))
    began = time.perf_counter()
    attend(q, k, v).sum().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    at = torch.arange(args.positions)
    mask = (at <= at[:, None]) & (at > at[:, None] - 128)
    attention = F.scaled_dot_product_attention
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "dense causal": lambda q, k, v: attention(q, k, v, is_causal=True),
        "mask T x T, window 128": lambda q, k, v: attention(q, k, v, attn_mask=mask),
    }
    for window in WINDOWS:
        ways[f"banded, window {window}"] = lambda q, k, v, window=window: banded_attention(
            q, k, v, window, 0.0
        )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        for name, attend in ways.items():
            seconds[name].append(once(attend, args.positions))
    medians = {name: round(statistics.median(times[1:]), 3) for name, times in seconds.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "torch": torch.__version__}
    print(json.dumps(result | {"positions": args.positions, "seconds": medians}, indent=2))


if __name__ == "__main__":
    main()
