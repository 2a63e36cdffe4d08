"""One training of the study, and what is measured of it: a plain loop that can be killed.

    train(name, setting, data, seed, directory)    a Finding, kept as result.json

The batches are a function of the seed and the step, and there is no dropout, so a training that
goes on from its checkpoint ends with the same numbers as one that was never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import IGNORED, Batches, Shards, in_order
from tiedgpt.errors import DivergedError
from tiedgpt.files import read_json, reading, remove, replacing, write_json
from tiedgpt.inspect import gradient_split
from tiedgpt.inspect.rows import trend
from tiedgpt.study.models import Model, build, matrices
from tiedgpt.text import Tokenizer
from tiedgpt.train import fast_training

BETAS = (0.9, 0.95)
WARMUP = 0.1
"""Share of the steps in which the rate rises; then it falls to 0, both linearly."""
CLIP = 1.0
PARTS = 12
"""A training is measured at its start and at the end of so many parts, which grow."""
PART_WINDOWS = 64
"""Validation windows that a measurement in between takes."""
SPLIT_WINDOWS = 4
"""Validation windows whose gradients are split."""
GROUPS = 10
SAMPLE_TOKENS, TEMPERATURE, TOP_K = 64, 0.8, 50
Numbers = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trainings share."""

    config: GPTConfig
    """Of the tied GPT."""
    steps: int
    batch_size: int = 16
    lr: float = 5e-3


@dataclass(frozen=True)
class Data:
    """The tokens, and how frequent they are."""

    tokenizer: Tokenizer
    train: Shards
    val: Shards
    counts: np.ndarray
    """(V,) of each token in the training text."""
    group: np.ndarray
    """(V,) each token's decile: 0 holds the most frequent tenth of the tokens that occur."""


def deciles(counts: np.ndarray) -> np.ndarray:
    """Return (V,) the decile of each token; tokens that never occur are of the last."""
    order, n_seen = np.argsort(-counts, kind="stable"), int((counts > 0).sum())
    group = np.full(len(counts), GROUPS - 1)
    group[order[:n_seen]] = np.arange(n_seen) * GROUPS // max(n_seen, 1)
    return group


def train(
    name: str,
    setting: Setting,
    data: Data,
    seed: int,
    directory: Path,
    progress: Callable[[int], None] = lambda step: None,
) -> Numbers:
    """Return what a training found; one that is finished is read, one that was killed goes on.

    Raises `DivergedError` for a loss that is not finite.
    """
    result, checkpoint = directory / "result.json", directory / "checkpoint.pt"
    if result.exists():
        return read_json(result)
    model, config, steps = build(name, setting.config, seed), setting.config, setting.steps
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0, fused=True)
    measured: list[Numbers] = []
    first, seconds = 0, 0.0
    if checkpoint.exists():
        with reading(checkpoint, "checkpoint of the study"):
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first, seconds, measured = state["step"], state["seconds"], state["measured"]
    sizes = {"batch_size": setting.batch_size, "n_positions": config.n_positions}
    batches = Batches(data.train, **sizes, seed=seed)
    pauses = {round(steps * (part / PARTS) ** 2) for part in range(PARTS + 1)}
    for step in range(first, steps + 1):
        if step in pauses and step not in [one["step"] for one in measured]:
            measured.append({"step": step, **_measure(model, data, setting)})
            _save(checkpoint, model, optimizer, step, seconds, measured)
        progress(step)
        if step == steps:
            break
        began = time.perf_counter()
        train_step(model, optimizer, batches.batch(step), rate(step, setting))
        seconds += time.perf_counter() - began
    found = {
        "model": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "curve": measured,
        **_finding(model, data, setting, seed),
    }
    if isinstance(model, GPT):  # for `tiedgpt inspect`
        model.save_pretrained(directory / "model")
        data.tokenizer.save_pretrained(directory / "model")
    write_json(result, found)
    remove(checkpoint)
    return found


def rate(step: int, setting: Setting) -> float:
    """Return the learning rate of a step, from 0."""
    warmup = max(1, round(WARMUP * setting.steps))
    falling = (setting.steps - step) / max(1, setting.steps - warmup)
    return setting.lr * min((step + 1) / warmup, falling)


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: tuple[np.ndarray, np.ndarray],
    lr: float,
) -> None:
    """Update the model on ids and targets, each (B, T)."""
    ids, targets = map(torch.from_numpy, batch)
    for group in optimizer.param_groups:
        group["lr"] = lr
    with fast_training(model) if isinstance(model, GPT) else nullcontext():
        loss = model.loss(ids, targets)
        loss.backward()
    if not math.isfinite(value := float(loss.detach())):
        raise DivergedError(f"the loss became {value}: use other text, or fewer --minutes")
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def _save(
    path: Path,
    model: Model,
    optimizer: torch.optim.Optimizer,
    step: int,
    seconds: float,
    measured: list[Numbers],
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with replacing(path) as temporary:
        torch.save(state | {"seconds": seconds, "measured": measured}, temporary)


def _measure(model: Model, data: Data, setting: Setting) -> Numbers:
    """Return the loss on a part of the validation text; of a GPT, the split of W's gradient."""
    _, nats = losses(model, data, setting, at_most=PART_WINDOWS)
    found: Numbers = {"loss": float(nats.mean())}
    if not isinstance(model, GPT):
        return found
    windows = in_order(
        data.val, batch_size=1, n_positions=setting.config.n_positions, at_most=SPLIT_WINDOWS
    )
    splits = [gradient_split(model, None, ids[0]) for ids, _ in windows]
    for key in ("norm_read", "norm_predict", "cosine"):
        found[key] = float(np.mean([getattr(split, key) for split in splits]))
    shares = [s.norm_predict / (s.norm_read + s.norm_predict) for s in splits]
    return found | {"predict_share": float(np.mean(shares))}


@torch.no_grad()
def losses(
    model: Model, data: Data, setting: Setting, *, at_most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets (N,) of the validation text, or of some windows, and their nats (N,)."""
    found = []
    sizes = {"batch_size": setting.batch_size, "n_positions": setting.config.n_positions}
    for batch in in_order(data.val, **sizes, at_most=at_most):
        ids, targets = map(torch.from_numpy, batch)
        nats = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
        counted = targets.flatten() != IGNORED
        found.append((targets.flatten()[counted].numpy(), nats[counted].numpy()))
    targets_of_all, nats_of_all = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return targets_of_all, nats_of_all.astype(np.float64)


def _finding(model: Model, data: Data, setting: Setting, seed: int) -> Numbers:
    """Return the final loss, the loss by decile, the norms of the rows by decile, and a sample."""
    targets, nats = losses(model, data, setting)
    group = data.group[targets]
    sums = np.bincount(group, nats, GROUPS) / np.maximum(1, np.bincount(group, minlength=GROUPS))
    seen = data.counts > 0
    rows: dict[str, Numbers] = {}
    for does, matrix in matrices(model).items():
        rows[does] = {}
        for kind, weight in (("raw", matrix), ("centred", matrix - matrix.mean(0))):
            norms = weight.norm(dim=1).numpy()
            means = [float(norms[seen & (data.group == g)].mean()) for g in range(GROUPS)]
            rows[does][kind] = {"by_decile": means, "spearman": trend(norms, data.counts)[0]}
    return {
        "loss": float(nats.mean()),
        "by_decile": [float(value) for value in sums],
        "rows": rows,
        "sample": sample(model, data, setting.config.n_positions, seed),
    }


@torch.no_grad()
def sample(model: Model, data: Data, context: int, seed: int) -> str:
    """Return how a model begins a text, drawn by temperature among the likeliest tokens."""
    start = data.tokenizer.eos_token_id or 0
    ids, draws = [start], torch.Generator().manual_seed(seed)
    for _ in range(SAMPLE_TOKENS):
        logits = model(torch.tensor([ids[-context:]]))[0, -1]
        top = logits.topk(min(TOP_K, len(logits)))
        chosen = torch.multinomial((top.values / TEMPERATURE).softmax(-1), 1, generator=draws)
        if (new := int(top.indices[chosen])) == data.tokenizer.eos_token_id:
            break
        ids.append(new)
    return data.tokenizer.decode(ids[1:])
