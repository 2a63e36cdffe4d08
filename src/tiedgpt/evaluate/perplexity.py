"""Scoring of held-out data: the loop that every evaluation runs, and what it says of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.runtime import eval_mode


@dataclass(frozen=True)
class Score:
    """Loss of a text."""

    nats: float
    """Mean cross-entropy a token, in nats."""
    bits_per_byte: float
    """Loss of the text in bits per UTF-8 byte; it does not depend on the tokenizer."""


@torch.no_grad()
def totals(
    model: nn.Module,
    batches: Iterable[Sequence[np.ndarray]],
    measure: Callable[[tuple[Tensor, ...]], Sequence[float]],
    *,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Add up what `measure` returns of each batch, with the model in evaluation mode.

    `measure` gets the batch as tensors on the model's device. The model is put back into training
    mode if it was in it.
    """
    device = next(model.parameters()).device
    total = np.zeros(1)
    with eval_mode(model):
        for arrays in batches:
            batch = tuple(torch.from_numpy(array).to(device) for array in arrays)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                total = total + np.array(measure(batch), np.float64)
    return [float(value) for value in total]


def score(
    model: GPT,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    byte_lengths: np.ndarray,
    *,
    autocast: torch.dtype | None = None,
) -> Score:
    """Score batches of (ids, targets), each (B, T), targets of -100 not counted.

    `byte_lengths` (V,) gives the bytes of text that each token stands for.
    """

    def measure(batch: tuple[Tensor, ...]) -> Sequence[float]:
        ids, targets = batch
        counted = targets[targets != IGNORED].cpu().numpy()
        loss = float(model.loss(ids, targets))
        return loss * len(counted), len(counted), int(byte_lengths[counted].sum())

    nats, tokens, n_bytes = totals(model, batches, measure, autocast=autocast)
    return Score(nats / max(tokens, 1), nats / math.log(2) / max(n_bytes, 1))
