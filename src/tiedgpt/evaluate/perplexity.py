"""Loss of held-out data: the evaluation loop, and the sums for bits per byte of a text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.runtime import eval_mode


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


def measure_text(
    model: GPT, batch: tuple[Tensor, ...], byte_lengths: np.ndarray
) -> tuple[float, int, int]:
    """Return the sum of the losses in nats, the tokens and the UTF-8 bytes of a batch.

    The batch is (ids, targets), each (B, T), without the targets of -100; one of packed documents
    also has `document_starts`, as `GPT.loss` does. `byte_lengths` (V,) are those of the tokens.
    """
    ids, targets, *packed = batch
    counted = targets[targets != IGNORED].cpu().numpy()
    loss = float(model.loss(ids, targets, document_starts=packed[0] if packed else None))
    return loss * len(counted), len(counted), int(byte_lengths[counted].sum())
