"""One training of the study, and what is measured of it.

The batches are a function of the seed and the step, and there is no dropout: a training that is
repeated gives the same numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import IGNORED, Batches, Shards, in_order
from tiedgpt.data.order import Batch
from tiedgpt.errors import DivergedError
from tiedgpt.inspect import gradient_split
from tiedgpt.study.models import Model, build, matrices
from tiedgpt.text import Tokenizer
from tiedgpt.train import fast_training
from tiedgpt.train.schedule import learning_rate

BATCH_SIZE, LR, BETAS, CLIP = 16, 5e-3, (0.9, 0.95), 1.0
WARMUP = 0.25
"""Share of the steps in which the rate rises; then it falls to 0, both linearly.

With 0.1 some seeds stood still for a while once the frequencies were learned: all GPTs ended up to
0.2 nats higher, and the differences spread over the seeds five times as far.
"""
PARTS = 12
"""A training is measured at its start and at the end of so many parts, which grow."""
PART_WINDOWS, SPLIT_WINDOWS = 64, 4
"""Validation windows whose loss is measured then, and whose gradients are split."""
GROUPS = 10
SAMPLE_TOKENS, TEMPERATURE = 64, 0.8
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all trainings share."""

    config: GPTConfig
    """Of the tied GPT."""
    steps: int
    tokenizer: Tokenizer
    train: Shards
    val: Shards

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a batch."""
        return {"batch_size": BATCH_SIZE, "n_positions": self.config.n_positions}

    @cached_property
    def counts(self) -> np.ndarray:
        """(V,) of each token in the training text."""
        return np.bincount(self.train.read(0, len(self.train)), minlength=len(self.tokenizer))

    @property
    def seen(self) -> np.ndarray:
        """(n,) the tokens that occur in the training text."""
        return np.flatnonzero(self.counts)

    @cached_property
    def group(self) -> np.ndarray:
        """(V,) the decile of each token."""
        return deciles(self.counts)

    @cached_property
    def targets(self) -> np.ndarray:
        """(GROUPS,) validation targets in each decile."""
        return np.bincount(self.group[self.val.read(1, len(self.val))], minlength=GROUPS)

    def by_decile(self, tokens: np.ndarray, values: np.ndarray) -> list[float]:
        """Return the mean in each decile of values (N,) that belong to tokens (N,)."""
        group = self.group[tokens]
        return (np.bincount(group, values) / np.bincount(group)).tolist()


def deciles(counts: np.ndarray) -> np.ndarray:
    """Return (V,) the decile of each token: 0 holds the most frequent tenth of those that occur.

    Tokens that never occur are of the last.
    """
    order, n_seen = np.argsort(-counts, kind="stable"), int((counts > 0).sum())
    group = np.full(len(counts), GROUPS - 1)
    group[order[:n_seen]] = np.arange(n_seen) * GROUPS // max(n_seen, 1)
    return group


def train(name: str, setting: Setting, seed: int) -> tuple[Model, Numbers]:
    """Return a trained model and what was found; `DivergedError` for a loss that is not finite."""
    model, steps = build(name, setting.config, seed), setting.steps
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0, fused=True)
    batches = Batches(setting.train, **setting.sizes, seed=seed)
    pauses = {round(steps * (part / PARTS) ** 2) for part in range(PARTS)}
    warmup = max(1, round(WARMUP * steps))
    measured: list[Numbers] = []
    for step in range(steps):
        if step in pauses:
            measured.append({"step": step, **_measure(model, setting)})
        rate = learning_rate(step, peak=LR, warmup=warmup, steps=steps)
        train_step(model, optimizer, batches.batch(step), rate)
    measured.append({"step": steps, **_measure(model, setting)})
    return model, {
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": {key: [point[key] for point in measured] for key in measured[0]},
        **_by_frequency(model, setting),
        "sample": sample(model, setting, seed),
    }


def train_step(model: Model, optimizer: Optimizer, batch: Batch, rate: float) -> None:
    """Update the model on ids and targets, each (B, T)."""
    ids, targets = map(torch.from_numpy, batch)
    optimizer.param_groups[0]["lr"] = rate
    with fast_training(model) if isinstance(model, GPT) else nullcontext():
        loss = model.loss(ids, targets)
        loss.backward()
    if not loss.isfinite():
        raise DivergedError(
            f"the loss became {float(loss)}", hint="use other text, or another number of steps"
        )
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def _measure(model: Model, setting: Setting) -> Numbers:
    """Return the loss on a part of the validation text; of a GPT, the split of W's gradient."""
    found = {"loss": float(losses(model, setting, at_most=PART_WINDOWS)[1].mean())}
    if not isinstance(model, GPT):
        return found
    windows = in_order(setting.val, **setting.sizes | {"batch_size": 1}, at_most=SPLIT_WINDOWS)
    splits = [gradient_split(model, None, ids[0]) for ids, _ in windows]
    shares = [s.norm_predict / (s.norm_read + s.norm_predict) for s in splits]
    cosine = np.mean([split.cosine for split in splits])
    return found | {"predict_share": float(np.mean(shares)), "cosine": float(cosine)}


@torch.no_grad()
def losses(
    model: Model, setting: Setting, *, at_most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets (N,) of the validation text, or of some windows, and their nats (N,)."""
    found = []
    for batch in in_order(setting.val, **setting.sizes, at_most=at_most):
        ids, targets = (torch.from_numpy(side) for side in batch)
        logits, answers = model(ids).flatten(0, 1), targets.flatten()
        found.append((answers, F.cross_entropy(logits, answers, reduction="none")))
    targets_of_all, nats = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    counted = targets_of_all != IGNORED
    return targets_of_all[counted], nats[counted].astype(np.float64)


def _by_frequency(model: Model, setting: Setting) -> Numbers:
    """Return the final loss, and by decile the loss and the norms of each matrix's rows."""
    targets, nats = losses(model, setting)
    found: Numbers = {"loss": float(nats.mean()), "by_decile": setting.by_decile(targets, nats)}
    for kind in ("raw", "centred"):
        found[kind] = {}
        for does, matrix in matrices(model).items():
            rows = matrix if kind == "raw" else matrix - matrix.mean(0)
            norms = rows.norm(dim=1).numpy()[setting.seen]
            found[kind][does] = setting.by_decile(setting.seen, norms)
    return found


@torch.no_grad()
def sample(model: Model, setting: Setting, seed: int) -> str:
    """Return how a model begins a text, drawn by temperature."""
    end = setting.tokenizer.eos_token_id or 0
    ids, draws = [end], torch.Generator().manual_seed(seed)
    while len(ids) <= SAMPLE_TOKENS:
        logits = model(torch.tensor([ids[-setting.config.n_positions :]]))[0, -1]
        probabilities = (logits / TEMPERATURE).softmax(-1)
        new = int(torch.multinomial(probabilities, 1, generator=draws))
        if new == end:
            break
        ids.append(new)
    return setting.tokenizer.decode(ids[1:])
