"""The record that describes an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Build = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
"""Function of torch's parameter groups and the learning rate that returns an optimizer."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer of the blocks' matrices, and the numbers that planning needs."""

    name: str
    """Value of --optimizer."""
    label: str
    """Name in the paper, for people."""
    build: Build
    moments: int
    """Tensors of optimizer state of each parameter's shape."""
    width_exponent: float
    """The peak learning rate is proportional to 1 / width ** width_exponent."""
    build_sharded: Build | None = None
    """Constructor for parameters that FSDP2 shards; None: `build` works on shards."""
    splits_attention: bool = False
    """Whether Q, K and V are updated as three matrices (`n_matrices` of a parameter group)."""
