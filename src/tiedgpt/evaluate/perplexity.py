"""Loss of held-out data: the evaluation loop, and bits per byte of a text."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
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


def running_totals(
    model: nn.Module,
    batches: Iterable[Sequence[np.ndarray]],
    measure: Callable[[tuple[Tensor, ...]], Sequence[float]],
    *,
    autocast: torch.dtype | None,
) -> Generator[list[float], None, None]:
    """Yield the sums of the measures after each batch, with the model in evaluation mode.

    `measure` receives a batch of tensors on the model's device. The training mode is restored.
    """
    device = next(model.parameters()).device
    total = np.zeros(1)
    with eval_mode(model):
        for arrays in batches:
            batch = tuple(torch.from_numpy(array).to(device) for array in arrays)
            is_narrow = autocast is not None
            with torch.no_grad(), torch.autocast(device.type, autocast, enabled=is_narrow):
                total = total + np.array(measure(batch), np.float64)
            yield [float(value) for value in total]


def totals(
    model: nn.Module,
    batches: Iterable[Sequence[np.ndarray]],
    measure: Callable[[tuple[Tensor, ...]], Sequence[float]],
    *,
    autocast: torch.dtype | None,
) -> list[float]:
    """Return the last of `running_totals`, the sums over all batches; [0.0] without any."""
    *_, sums = [0.0], *running_totals(model, batches, measure, autocast=autocast)
    return sums


def measure_text(
    model: GPT, batch: tuple[Tensor, ...], byte_lengths: np.ndarray
) -> tuple[float, int, int]:
    """Return the sum of the losses, the tokens and the bytes of a batch (see `score`)."""
    ids, targets, *packed = batch
    counted = targets[targets != IGNORED].cpu().numpy()
    loss = float(model.loss(ids, targets, document_starts=packed[0] if packed else None))
    return loss * len(counted), len(counted), int(byte_lengths[counted].sum())


def score_text(sums: Sequence[float]) -> Score:
    """Return the score of the sums of `measure_text`."""
    nats, tokens, n_bytes = sums
    return Score(nats / max(tokens, 1), nats / math.log(2) / max(n_bytes, 1))


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
    measure = functools.partial(measure_text, model, byte_lengths=byte_lengths)
    return score_text(totals(model, batches, measure, autocast=autocast))
