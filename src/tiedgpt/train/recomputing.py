"""How blocks run while they are trained: computed again in backward, compiled, or as they are.

A block that is computed again keeps only what went into it, 4 bytes a unit of width, until backward
comes to it (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174).
Random streams go back to where they were, so the gradients are the same bit for bit. Only the class
of the modules changes: parameters, their names and whatever is saved stay as they are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tiedgpt.core.cache import KVCache
from tiedgpt.core.layers import Block
from tiedgpt.train.compiling import compiled
from tiedgpt.train.memory import return_memory_at_once
from tiedgpt.train.plan import Plan
from tiedgpt.train.task import Model, body_of

Recompute = Literal["off", "blocks"]


def in_training(model: Model, plan: Plan) -> Model:
    """Let the blocks run as planned wherever gradients are wanted; with a cache, as they are."""
    if plan.memory is not None or plan.recompute == "blocks":
        return_memory_at_once()
    if plan.recompute == "off" and plan.compile == "off":
        return model
    for block in body_of(model).h:
        assert isinstance(block, Block)
        block.__class__ = TrainedBlock
        assert isinstance(block, TrainedBlock)
        block.recompute, block.compiled = plan.recompute == "blocks", plan.compile == "on"
    return model


class TrainedBlock(Block):
    """A block that is compiled or computed again in backward, or both, where it is trained."""

    recompute: bool
    compiled: bool

    def forward(
        self, x: Tensor, layer: int, past: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if past is not None or not torch.is_grad_enabled():
            return super().forward(x, layer, past, mask)
        run = compiled(Block.forward, x.shape) if self.compiled else Block.forward
        if not self.recompute:
            return run(self, x, layer, past, mask)
        kept: Tensor = checkpoint(run, self, x, layer, past, mask, use_reentrant=False)
        return kept

    def extra_repr(self) -> str:
        """Say in `print(model)` what is done."""
        done = ("compiled", self.compiled), ("computed again in backward", self.recompute)
        return ", ".join(what for what, is_done in done if is_done)
