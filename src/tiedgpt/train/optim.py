"""The optimizer's groups, in which every parameter stands exactly once, and the learning rate.

The matrix that reads and predicts is a group of its own: it is an embedding and a projection at
once, so whatever is decided about it is decided here, by name, and shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tiedgpt.core.model import GPT

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Group:
    """Parameters that share a policy."""

    name: str
    parameters: dict[str, nn.Parameter]
    weight_decay: float

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        decay = f"decay {self.weight_decay:g}" if self.weight_decay else "no decay"
        return f"{self.name}: {count:,} parameters, {decay}"


def parameter_groups(model: GPT, *, weight_decay: float) -> list[Group]:
    """Sort the trainable parameters into groups: W, positions, products, a head, the rest.

    W is not decayed: the length of a row is how often its token is predicted as much as what it
    means when read, and decay would flatten the first to shrink the second.
    """
    groups = {
        name: Group(name, {}, decay)
        for name, decay in (
            ("W, which reads and predicts" if model.head is None else "W, which reads", 0.0),
            ("head", weight_decay),
            ("positions", 0.0),
            ("matrices of the blocks", weight_decay),
            ("norms and biases", 0.0),
        )
    }
    shared, head, positions, matrices, rest = groups.values()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter is model.wte.weight:
            group = shared
        elif name.startswith("head."):
            group = head
        elif name.startswith("wpe."):
            group = positions
        else:
            group = matrices if parameter.ndim >= 2 else rest
        group.parameters[name] = parameter
    return [group for group in groups.values() if group.parameters]


def adamw(groups: Iterable[Group], *, lr: float) -> torch.optim.AdamW:
    """Return AdamW over the groups, fused into one pass a step."""
    return torch.optim.AdamW(
        [
            {"params": list(group.parameters.values()), "weight_decay": group.weight_decay}
            for group in groups
        ],
        lr=lr,
        betas=BETAS,
        fused=True,
    )


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Return step's rate: linear warm-up to `peak`, then linear decay to 0 after the last step.

    Decay to zero: Bergsma et al. 2025, "Straight to Zero" (arXiv 2502.15938).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)
