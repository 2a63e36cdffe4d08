"""A laboratory: variants of the default recipe at equal tokens, by text and seed.

    python bench/variants.py TEXT... [--size tiny] [--steps 1300] [--seeds 0 1] [--only NAME ...]

A text is a file, read by characters; the last tenth is held out. Every run sees as many characters
as `--steps` steps of 16 windows of 128 hold; the rate rises over the first hundredth part and falls
in a line to 0. Variants change one thing each (`VARIANTS`). With one seed all begin alike, so the
differences to the first are paired. They count only beyond their spread over texts and seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiedgpt import GPT, GPTConfig
from tiedgpt.train import fast_training
from tiedgpt.train.plan.sizes import SIZES
from tiedgpt.train.step.optim import muon
from tiedgpt.train.step.optim.groups import Optimizers, optimizers, parameter_groups

CONTEXT, ROWS, WARMUP = 128, 16, 100
Share = Callable[[float], int]
"""A number by the share of all characters that were seen."""


@dataclass(frozen=True)
class Variant:
    """Differences from the default."""

    rates: dict[str, float] = field(default_factory=dict)
    """Factors of the rate by the beginning of a group's name."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float | None = None
    joined: bool = False
    """Q, K and V are one matrix to Muon."""
    muon: type[torch.optim.Optimizer] | None = None
    momentum: float = 0.95
    momentum_warmup: int = 0
    """Steps in which Muon's momentum rises from 0.85."""
    floors: dict[str, float] = field(default_factory=dict)
    """Smallest share of the peak rate after its warm-up, by the beginning of a group's name."""
    shape: dict[str, int] = field(default_factory=dict)
    start: Callable[[GPT], None] = lambda model: None
    rows: Share = lambda share: ROWS
    context: Share = lambda share: CONTEXT
    averaged: float = 0.0
    """The share of the end over which weights are averaged, by steps."""
    decay: float = 1.0
    """Factor of a step's weight in that average from each step to the one before."""
    without_w: bool = False
    dropout: float = 0.0
    z: float = 0.0
    """Weight of log(sum of exp(logits))^2 in the loss."""
    epochs: bool = False
    """Windows from a permutation, cut anew each epoch, rather than drawn."""


class Cautious(muon.Muon):
    """Muon whose decay takes only weights that the update shrinks, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update without decay, then decay."""
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for p in group["params"]:
                shrinks = (p - before[p]) * before[p] < 0
                p.sub_(before[p] * shrinks, alpha=group["lr"] * decay)


class NorMuon(muon.Muon):
    """Muon with rows of an update brought to one size (arXiv 2510.05491)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update by other directions."""
        plain = muon.newton_schulz
        held = self.__dict__.setdefault("rows", {})

        def by_rows(x: Tensor) -> Tensor:
            made = plain(x).float()
            squares = made.square().mean(dim=2, keepdim=True)
            key = len(held["now"])
            held["now"].append(squares)
            if "mean" in held:
                squares = held["mean"][key].lerp(squares, 0.05)
                held["now"][key] = squares
            scaled = made / squares.sqrt().clamp(min=1e-8)
            return scaled * (made.norm(dim=(1, 2)) / scaled.norm(dim=(1, 2)))[:, None, None]

        held["now"] = []
        muon.newton_schulz = by_rows
        try:
            super().step()
        finally:
            muon.newton_schulz = plain
        held["mean"] = held["now"]


def steps_of(coefficients: list[tuple[float, float, float]]) -> type[torch.optim.Optimizer]:
    """Return a Muon whose Newton-Schulz takes these polynomials, in fp32."""

    def orthogonal(x: Tensor) -> Tensor:
        x = x.float()
        x = x.mT if (tall := x.shape[1] > x.shape[2]) else x
        x = x / (1.01 * x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if tall else x

    class Other(muon.Muon):
        def step(self, closure: Any = None) -> None:
            plain, muon.newton_schulz = muon.newton_schulz, orthogonal
            try:
                super().step()
            finally:
                muon.newton_schulz = plain

    return Other


POLAR = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
"""Polar Express (arXiv 2505.16932), for five steps."""
JORDAN = [(muon.A, muon.B, muon.C)]


def scaled(names: tuple[str, ...], factor: Callable[[GPT], float]) -> Callable[[GPT], None]:
    """Return what multiplies the first weights of parameters whose names end so."""

    def start(model: GPT) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(names):
                    parameter.mul_(factor(model))

    return start


BLOCK = ("c_attn.weight", "c_fc.weight")
OUT = ("c_proj.weight",)
VARIANTS = {
    "default": Variant(),
    "Q, K and V as one": Variant(joined=True),
    "beta2 0.98": Variant(betas=(0.9, 0.98)),
    "beta2 0.99": Variant(betas=(0.9, 0.99)),
    "beta2 0.999": Variant(betas=(0.9, 0.999)),
    "beta1 0.8": Variant(betas=(0.8, 0.95)),
    "beta1 0.8, beta2 0.98": Variant(betas=(0.8, 0.98)),
    "W x 2": Variant({"W": 2.0}),
    "W x 0.5": Variant({"W": 0.5}),
    "positions x 2": Variant({"positions": 2.0}),
    "positions x 0.5": Variant({"positions": 0.5}),
    "norms x 2": Variant({"norms": 2.0}),
    "norms x 0.5": Variant({"norms": 0.5}),
    "rate x 0.7": Variant({"": 0.7}),
    "rate x 1.4": Variant({"": 1.4}),
    "Muon x 1.4": Variant({"matrices": 1.4, "queries": 1.4}),
    "Muon x 0.7": Variant({"matrices": 0.7, "queries": 0.7}),
    "decay 0.1": Variant(weight_decay=0.1),
    "decay 0.6": Variant(weight_decay=0.6),
    "decay cautious": Variant(muon=Cautious),
    "decay 0.6 cautious": Variant(muon=Cautious, weight_decay=0.6),
    "NorMuon": Variant(muon=NorMuon),
    "Polar, 5 steps": Variant(muon=steps_of(POLAR)),
    "Polar, 4 steps": Variant(muon=steps_of([*POLAR[:3], POLAR[4]])),
    "Polar, 3 steps": Variant(muon=steps_of([*POLAR[:2], POLAR[4]])),
    "Jordan, 4 steps": Variant(muon=steps_of(4 * JORDAN)),
    "Jordan, 3 steps": Variant(muon=steps_of(3 * JORDAN)),
    "momentum 0.9": Variant(momentum=0.9),
    "momentum from 0.85 in 200": Variant(momentum_warmup=200),
    "W not below 0.1": Variant(floors={"W": 0.1}),
    "W x 0.5, not below 0.2": Variant({"W": 0.5}, floors={"W": 0.2}),
    "W and positions x 2, not below 0.1": Variant(
        {"W": 2.0, "positions": 2.0}, floors={"W": 0.1, "positions": 0.1}
    ),
    "tail of 0.1 averaged": Variant(averaged=0.1),
    "tail of 0.1, EMA 0.98": Variant(averaged=0.1, decay=0.98),
    "tail of 0.2 averaged, W not": Variant(averaged=0.2, without_w=True),
    "start by width": Variant(
        start=scaled(BLOCK, lambda m: 1 / (0.02 * math.sqrt(m.config.n_embd)))
    ),
    "half as large": Variant(start=scaled((*BLOCK, *OUT), lambda m: 0.5)),
    "projections 0": Variant(start=scaled(OUT, lambda m: 0.0)),
    "W started at 0.05": Variant(start=scaled(("wte.weight",), lambda m: 2.5)),
    "4 rows": Variant(rows=lambda share: 4),
    "8 rows": Variant(rows=lambda share: 8),
    "32 rows": Variant(rows=lambda share: 32),
    "8 rows for 0.2": Variant(rows=lambda share: 8 if share < 0.2 else 16),
    "4 rows for 0.1, 8 for 0.3": Variant(
        rows=lambda share: 4 if share < 0.1 else 8 if share < 0.3 else 16
    ),
    "8 rows for 0.5": Variant(rows=lambda share: 8 if share < 0.5 else 16),
    "8, then 16, then 32 rows": Variant(
        rows=lambda share: 8 if share < 0.2 else 16 if share < 0.6 else 32
    ),
    "32 of 64, then 16 of 128": Variant(
        rows=lambda share: 32 if share < 0.3 else 16,
        context=lambda share: 64 if share < 0.3 else 128,
    ),
    "32 of 64 for 0.15": Variant(
        rows=lambda share: 32 if share < 0.15 else 16,
        context=lambda share: 64 if share < 0.15 else 128,
    ),
    "16 of 64 for 0.2": Variant(context=lambda share: 64 if share < 0.2 else 128),
    "context 64": Variant(rows=lambda share: 32, context=lambda share: 64),
    "context 256": Variant(
        rows=lambda share: 8, context=lambda share: 256, shape={"n_positions": 256}
    ),
    "4 x 96": Variant(shape={"n_layer": 4, "n_embd": 96, "n_head": 3}),
    "3 x 112": Variant(shape={"n_layer": 3, "n_embd": 112, "n_head": 4}),
    "4 x 128": Variant(shape={"n_layer": 4}),
    "2 heads": Variant(shape={"n_head": 2}),
    "8 heads": Variant(shape={"n_head": 8}),
    "dropout 0.05": Variant(dropout=0.05),
    "z-loss 1e-4": Variant(z=1e-4),
    "z-loss 1e-3": Variant(z=1e-3),
    "cut anew each epoch": Variant(epochs=True),
}


def make_optimizers(
    variant: Variant, model: GPT, size: str
) -> tuple[Optimizers, list[tuple[float, float]]]:
    """Return a variant's optimizers, and for each of their groups a factor of the rate, a floor."""
    default = SIZES[size].weight_decay
    decay = default if variant.weight_decay is None else variant.weight_decay
    groups = parameter_groups(model, matrices="muon", weight_decay=decay)
    if variant.joined:
        groups = [replace(group, n_matrices=1) for group in groups]
    adamw, muons = optimizers(groups, lr=1.0)
    for group in adamw.param_groups:
        group["betas"] = variant.betas
    for group in muons.param_groups:
        group["momentum"] = variant.momentum
    if variant.muon is not None:
        muons.__class__ = variant.muon
    names = [g.name for name in ("adamw", "muon") for g in groups if g.optimizer == name]

    def value(table: dict[str, float], name: str, default: float) -> float:
        return next((x for start, x in table.items() if name.startswith(start)), default)

    return [adamw, muons], [
        (value(variant.rates, name, 1.0), value(variant.floors, name, 0.0)) for name in names
    ]


def windows(ids: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return ids and targets (B, context) of windows that begin at `starts` (B,)."""
    rows = ids[starts[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


def cut_anew(n: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Yield starts of windows: all of them once in each epoch, from a new offset."""
    while True:
        offset = int(torch.randint(CONTEXT, (), generator=draw))
        starts = torch.arange(offset, n - CONTEXT - 1, CONTEXT)
        yield from starts[torch.randperm(len(starts), generator=draw)].split(ROWS)


def batches(variant: Variant, ids: Tensor, total: int, seed: int):
    """Yield the share of `total` characters that were seen, and the next ids and targets."""
    draw, seen = torch.Generator().manual_seed(seed), 0
    cuts = cut_anew(len(ids), draw)
    while seen < total:
        rows, context = variant.rows(seen / total), variant.context(seen / total)
        drawn = torch.randint(len(ids) - context, (rows,), generator=draw)
        starts = next(cuts) if variant.epochs else drawn
        yield seen / total, windows(ids, starts, context)
        seen += starts.numel() * context


def loss_of(variant: Variant, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the loss that is trained."""
    if not variant.z:
        return model.loss(ids, targets)
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss + variant.z * logits.logsumexp(-1).square().mean()


def final_loss(variant: Variant, ids: Tensor, size: str, steps: int, seed: int):
    """Train a model; return its nats a character on the held-out text, and the seconds of steps."""
    shape = {name: getattr(SIZES[size], name) for name in ("n_layer", "n_embd", "n_head")}
    shape |= {"n_positions": CONTEXT} | variant.shape
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), variant.dropout)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=int(ids.max()) + 1, **shape, **dropout))
    variant.start(model)
    made, factors = make_optimizers(variant, model, size)
    groups = [group for optimizer in made for group in optimizer.param_groups]
    learned, held_out = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    averages: list[dict[str, Tensor]] = []
    began = time.perf_counter()
    for share, batch in batches(variant, learned, steps * ROWS * CONTEXT, seed):
        rising, falling = (share * steps + 1) / WARMUP, (1 - share) / (1 - WARMUP / steps)
        for group, (factor, floor) in zip(groups, factors, strict=True):
            group["lr"] = SIZES[size].lr * min(1.0, rising, max(floor, falling)) * factor
        if variant.momentum_warmup:
            warmed = min(1.0, share * steps / variant.momentum_warmup)
            for group in made[1].param_groups:
                group["momentum"] = 0.85 + warmed * (variant.momentum - 0.85)
        model.zero_grad(set_to_none=True)
        with fast_training(model):
            loss_of(variant, model, *batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
        if share > 1 - variant.averaged:
            averages.append({name: p.detach().clone() for name, p in model.named_parameters()})
    seconds = time.perf_counter() - began
    with torch.no_grad():
        for name, p in model.named_parameters() if averages else ():
            if not (variant.without_w and name == "wte.weight"):
                weights = variant.decay ** torch.arange(len(averages) - 1.0, -1.0, -1.0)
                stack = torch.stack([each[name] for each in averages])
                p.copy_(torch.tensordot(weights / weights.sum(), stack, 1))
    return score(model.eval(), held_out, variant.context(1.0)), seconds


@torch.no_grad()
def score(model: GPT, ids: Tensor, context: int) -> float:
    """Return the mean loss over all whole windows of a text."""
    parts = torch.arange(0, len(ids) - context, context).split(64)
    losses = [float(model.loss(*windows(ids, part, context))) * len(part) for part in parts]
    return sum(losses) / sum(map(len, parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    args = parser.parse_args()
    texts = {}
    for path in args.texts:
        text = path.read_text(encoding="utf-8")
        number = {character: id for id, character in enumerate(sorted(set(text)))}
        texts[path.stem] = torch.tensor([number[character] for character in text])
    first: dict[str, list[float]] = {}
    for name in args.only:
        for text, ids in texts.items():
            runs = [
                final_loss(VARIANTS[name], ids, args.size, args.steps, seed) for seed in args.seeds
            ]
            losses = [round(loss, 4) for loss, _ in runs]
            gains = [a - b for a, b in zip(losses, first.setdefault(text, losses), strict=True)]
            row = {
                "variant": name,
                "text": text,
                "size": args.size,
                "characters": args.steps * ROWS * CONTEXT,
                "nats by seed": losses,
                f"to {args.only[0]}": [round(gain, 4) for gain in gains],
                "mean": round(statistics.mean(gains), 4),
                "seconds": [round(seconds) for _, seconds in runs],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
