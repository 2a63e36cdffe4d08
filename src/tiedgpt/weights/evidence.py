"""What is kept of a model to compare another with, so that both need not be in memory at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tiedgpt.core.model import GPT

CHECKED_SHAPE = (2, 48)


@dataclass(frozen=True)
class Evidence:
    """What is kept of a model to compare another with, so that both need not be held at once."""

    digests: dict[str, bytes]
    dtype: torch.dtype
    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, model: GPT, ids: Tensor | None = None) -> Evidence:
        """Take a model's evidence, on ids (B, T) that another's was taken on, or on fresh ones."""
        config = model.config
        if ids is None:
            n = min(CHECKED_SHAPE[1], config.n_positions)
            draw = torch.Generator().manual_seed(0)
            ids = torch.randint(config.vocab_size, (CHECKED_SHAPE[0], n), generator=draw)
        with torch.inference_mode():
            logits = _in_fp32(model, ids)
        digests = {name: _digest(p) for name, p in model.named_parameters()}
        return cls(digests, model.wte.weight.dtype, ids, logits)


def _in_fp32(model: GPT, ids: Tensor) -> Tensor:
    """Return the logits with products in fp32 at least, whatever the weights' type."""
    dtype = model.wte.weight.dtype
    if dtype in (torch.float32, torch.float64):
        return model(ids)
    try:
        return model.float()(ids)
    finally:
        model.to(dtype)  # exact: every value came from this type


def _digest(parameter: Tensor) -> bytes:
    wide = torch.promote_types(parameter.dtype, torch.float32)  # exact: 16 bits compare with 32
    raw = parameter.detach().to("cpu", wide).contiguous().flatten().view(torch.uint8).numpy()
    return b"" if not raw.any() else hashlib.blake2b(raw.data, digest_size=16).digest()
