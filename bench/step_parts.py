"""Time a step with Muon, and without each part of `train/step/fast`, in turn; or profile it.

    python bench/step_parts.py [--size tiny little] [--dtype fp32 bf16] [--dropout 0.1]
    python bench/step_parts.py --profile

The ratio is the median over rounds of the seconds without a part over those of the whole step:
above 1 the part makes steps faster. `--profile` prints torch's operations by their own time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from tiedgpt.core.layers import MLP, Attention
from tiedgpt.core.model import GPT
from tiedgpt.train.plan.sizes import SIZES
from tiedgpt.train.step.blocks import keep_memory
from tiedgpt.train.step.fast import SUBSTITUTES, loss
from train import NO_DROPOUT, batch, once, ours, shape

SOFTMAX = "softmax kernel"
PARTS = {"attention": Attention, "GELU": MLP, "linear layers": nn.Linear, "dropout": nn.Dropout,
         "loss in one pass": GPT, SOFTMAX: None}  # fmt: skip
"""The modules whose substitutes are left out; the softmax kernel is a part of the loss."""


@contextmanager
def leave_out(name: str | None) -> Iterator[None]:
    """Leave out a part inside the block."""
    substitutes, suits_kernels = dict(SUBSTITUTES), loss.suits_kernels
    SUBSTITUTES.pop(PARTS.get(name), None)
    if name == SOFTMAX:
        loss.suits_kernels = lambda logits: False
    yield
    SUBSTITUTES.update(substitutes)
    loss.suits_kernels = suits_kernels


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny", "little"])
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--dropout", type=float, default=0.0, help="of embeddings and branches")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    args.context = args.batch = None
    keep_memory()
    for size, dtype in ((size, dtype) for size in args.size for dtype in args.dtype):
        config, rows = shape(args, size)
        dropout = dict.fromkeys(NO_DROPOUT, args.dropout) | {"attn_pdrop": 0.0}
        data = batch(config, rows, "cpu")
        step = ours(replace(config, **dropout), "cpu", False, dtype, "muon")
        seconds: dict[str | None, list[float]] = {name: [] for name in (None, *PARTS)}
        for number in range(3 if args.profile else args.rounds + 2):
            for name in [*seconds][:: 1 if number % 2 else -1]:
                with leave_out(name):
                    seconds[name].append(once(step, data))
        if args.profile:
            with torch.profiler.profile() as profile:
                once(step, data)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
            continue
        print(f"{size} {dtype}: {statistics.median(seconds[None][2:]):.4f} s")
        for name in PARTS:
            ratios = [a / b for a, b in zip(seconds[name][2:], seconds[None][2:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  without {name:17} {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)


if __name__ == "__main__":
    main()
