"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), fused into one pass per step."""

from __future__ import annotations

from typing import Any

import torch

from tiedgpt.train.optim.spec import OptimizerSpec

BETAS = (0.9, 0.95)
"""Brown et al. 2020, appendix B."""


def build(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Return a fused AdamW."""
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


ADAMW = OptimizerSpec(name="adamw", label="AdamW", build=build, moments=2, width_exponent=1.0)
"""The updates of elements add up over the inputs: Yang et al. 2022, arXiv 2203.03466, table 8."""
