"""How much memory training takes, by formula: what stays, and what a part of a batch adds."""

from __future__ import annotations

from dataclasses import dataclass

from tiedgpt.core.config import GPTConfig

KEPT = {"fp32": (32, 8), "bf16": (28, 4)}
"""Bytes that a block keeps of a position for its gradient: a unit of width, a unit of the MLP."""
DROPPED = (16, 18)
"""More with dropout: bytes a unit of width, and bytes a pair of positions in a head."""


@dataclass(frozen=True)
class Needed:
    """Bytes that training takes at its peak; the loss's logits and the allocator take more."""

    weights: int
    gradients: int
    moments: int
    activations: int
    """Of the sequences that are computed at a time."""
    batch: int
    """Ids and targets of a step, as read and as moved to the device."""

    @property
    def lasting(self) -> int:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.moments

    @property
    def passing(self) -> int:
        """What a batch adds."""
        return self.activations + self.batch

    @property
    def total(self) -> int:
        """All of it."""
        return self.lasting + self.passing


def needed(
    config: GPTConfig,
    *,
    batch_size: int,
    micro_batch: int,
    row_tokens: int,
    dtype: str,
    device: str = "cpu",
) -> Needed:
    """Estimate the peak; `dtype` is that of the products.

    Attention with dropout holds its T x T matrices on a CPU; a GPU's kernels do not.

    The constants are what the blocks' layers save for their gradients, checked against measured
    peaks: within a fifth at widths of 384 and above.
    """
    parameters = 4 * config.parameter_count()
    of_width, of_inner = KEPT["fp32" if dtype == "fp32" else "bf16"]
    position = of_width * config.n_embd + of_inner * config.inner_dim
    if config.attn_pdrop or config.resid_pdrop:
        masks, pairs = DROPPED
        position += masks * config.n_embd
        if config.attn_pdrop and device == "cpu":
            position += pairs * config.n_head * row_tokens
    return Needed(
        weights=parameters,
        gradients=parameters,
        moments=2 * parameters,
        activations=position * micro_batch * row_tokens * config.n_layer,
        batch=4 * 8 * batch_size * row_tokens,
    )
