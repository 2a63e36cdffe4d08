"""Variants of the default recipe at equal tokens: final losses by seed, and their differences.

    python bench/variants.py TEXT [--size tiny] [--steps 1300] [--seeds 0 1] [--only NAME ...]

TEXT is a file, read by characters; the last tenth is held out. Every variant trains the same model
on the same windows of 128 characters, 16 in a step, with a linear fall of the rate to 0; only the
optimizers differ (`VARIANTS`). With one seed all begin with the same weights, so the differences to
the default are paired. They count for something only beyond the spread between seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tiedgpt import GPT, GPTConfig
from tiedgpt.train import fast_training
from tiedgpt.train.optim import Optimizers, optimizers, parameter_groups, set_rate
from tiedgpt.train.options import SIZES

CONTEXT, ROWS, WARMUP, WEIGHT_DECAY = 128, 16, 100, 0.3


def default(model: GPT, *, joined: bool = False) -> Optimizers:
    """Return the optimizers of `tiedgpt train`; joined: with Q, K and V as one matrix to Muon."""
    groups = parameter_groups(model, matrices="muon", weight_decay=WEIGHT_DECAY)
    return optimizers([replace(g, n_matrices=1) if joined else g for g in groups], lr=1.0)


def with_beta2(beta2: float) -> Callable[[GPT], Optimizers]:
    """Return a variant in which AdamW averages squares of gradients for longer."""

    def variant(model: GPT) -> Optimizers:
        adamw, muon = default(model)
        for group in adamw.param_groups:
            group["betas"] = (group["betas"][0], beta2)
        return [adamw, muon]

    return variant


def torchs_muon(model: GPT) -> Optimizers:
    """Return a variant with torch's Muon, for which Q, K and V are one matrix."""
    adamw, muon = default(model)
    matrices = [{k: g[k] for k in ("params", "weight_decay")} for g in muon.param_groups]
    return [adamw, torch.optim.Muon(matrices, lr=1.0, adjust_lr_fn="match_rms_adamw")]


VARIANTS: dict[str, Callable[[GPT], Optimizers]] = {
    "default": default,
    "Q, K and V as one": lambda model: default(model, joined=True),
    "torch's Muon": torchs_muon,
    "beta2 0.98": with_beta2(0.98),
    "beta2 0.99": with_beta2(0.99),
    "beta2 0.999": with_beta2(0.999),
}


def windows(ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and targets (B, CONTEXT) of windows that begin at `starts` (B,)."""
    rows = ids[starts[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def final_loss(variant: str, ids: Tensor, size: str, steps: int, seed: int) -> tuple[float, float]:
    """Train a model; return its nats a character on the held-out text, and the seconds of steps."""
    shape = {name: getattr(SIZES[size], name) for name in ("n_layer", "n_embd", "n_head")}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    torch.manual_seed(seed)
    vocab_size = int(ids.max()) + 1
    model = GPT(GPTConfig(vocab_size=vocab_size, n_positions=CONTEXT, **shape, **dropout))
    made, draw = VARIANTS[variant](model), torch.Generator().manual_seed(seed)
    learned, held_out = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    began = time.perf_counter()
    for step in range(steps):
        fall = (steps - step) / max(1, steps - WARMUP)
        set_rate(made, SIZES[size].lr * min(1.0, (step + 1) / WARMUP, fall))
        batch = windows(learned, torch.randint(len(learned) - CONTEXT, (ROWS,), generator=draw))
        model.zero_grad(set_to_none=True)
        with fast_training(model):
            model.loss(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
    seconds = time.perf_counter() - began
    starts = torch.arange(0, len(held_out) - CONTEXT, CONTEXT)
    with torch.no_grad():
        losses = [float(model.loss(*windows(held_out, some))) for some in starts.split(64)]
    sizes = [len(some) for some in starts.split(64)]
    return sum(a * b for a, b in zip(losses, sizes, strict=True)) / sum(sizes), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    given = parser.parse_args()
    text = given.text.read_text()
    number = {character: id for id, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([number[character] for character in text])
    first: list[float] = []
    for name in given.only:
        runs = [final_loss(name, ids, given.size, given.steps, seed) for seed in given.seeds]
        losses = [round(loss, 4) for loss, _ in runs]
        first = first or losses
        gains = [a - b for a, b in zip(losses, first, strict=True)]
        row = {
            "variant": name,
            "size": given.size,
            "characters": given.steps * ROWS * CONTEXT,
            "nats by seed": losses,
            "mean": round(statistics.mean(losses), 4),
            f"to {given.only[0]}": round(statistics.mean(gains), 4),
            "seconds": [round(seconds) for _, seconds in runs],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
