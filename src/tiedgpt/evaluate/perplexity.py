"""Loss of held-out data: the evaluation loop, and bits per byte of a text."""

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
    autocast: torch.dtype | None,
) -> list[float]:
    """Return the sums of the measures of all batches, with the model in evaluation mode.

    `measure` receives a batch of tensors on the model's device. The training mode is restored.
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
    batches: Iterable[Sequence[np.ndarray]],
    byte_lengths: np.ndarray,
    *,
    autocast: torch.dtype | None = None,
) -> Score:
    """Score batches of (ids, targets), each (B, T), without the targets of -100.

    Batches of packed documents also have `document_starts`, as `GPT.loss` does. `byte_lengths` (V,)
    is the number of UTF-8 bytes of each token.
    """

    def measure(batch: tuple[Tensor, ...]) -> Sequence[float]:
        ids, targets, *packed = batch
        counted = targets[targets != IGNORED].cpu().numpy()
        loss = float(model.loss(ids, targets, document_starts=packed[0] if packed else None))
        return loss * len(counted), len(counted), int(byte_lengths[counted].sum())

    nats, tokens, n_bytes = totals(model, batches, measure, autocast=autocast)
    return Score(nats / max(tokens, 1), nats / math.log(2) / max(n_bytes, 1))
