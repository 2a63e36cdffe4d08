"""The mean loss over a text, also per byte of it, so that vocabularies can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT


@dataclass(frozen=True)
class Score:
    """What a model's predictions of a text cost."""

    nats: float
    """Mean cross-entropy a token, in nats."""
    bits_per_byte: float
    """The whole text's cost in bits over its length in UTF-8 bytes; tokenizers do not matter."""
    tokens: int
    """Tokens that were predicted."""


@torch.no_grad()
def score(
    model: GPT,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    byte_lengths: np.ndarray,
    *,
    autocast: torch.dtype | None = None,
) -> Score:
    """Score batches of (ids, targets), each (B, T), targets of -100 not counted.

    `byte_lengths` (V,) gives the bytes of text that each token stands for. The model is put back
    into training mode if it was in it.
    """
    device = model.wte.weight.device
    training = model.training
    model.eval()
    nats, tokens, n_bytes = 0.0, 0, 0
    try:
        for ids, targets in batches:
            counted = targets != IGNORED
            n = int(counted.sum())
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                loss = model.loss(
                    torch.from_numpy(ids).to(device), torch.from_numpy(targets).to(device)
                )
            nats += float(loss) * n
            tokens += n
            n_bytes += int(byte_lengths[targets[counted]].sum())
    finally:
        model.train(training)
    return Score(nats / max(tokens, 1), nats / math.log(2) / max(n_bytes, 1), tokens)
