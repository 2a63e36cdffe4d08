"""Where a step first left the finite numbers: weights, then the forward pass, then gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.errors import DivergedError
from tiedgpt.train.plan import Plan
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Arrays, Model


def first_not_finite(model: Model, batch: Arrays, plan: Plan) -> str:
    """Return what was first, as a clause; "" where all is finite. The batch is computed again."""
    for name, parameter in model.named_parameters():
        if n := _not_finite(parameter):
            return f"first not finite: the weights {name} ({n:,} of {parameter.numel():,})"
    found: list[str] = []

    def watch_output(name: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and (n := _not_finite(output)):
                found.append(f"the output of {name} ({n:,} of {output.numel():,})")

        return module.register_forward_hook(hook)

    def watch_gradient(name: str, parameter: nn.Parameter) -> Any:
        def hook(held: Tensor) -> None:
            if held.grad is not None and (n := _not_finite(held.grad)):
                found.append(f"the gradient of {name} ({n:,} of {held.numel():,})")

        return parameter.register_post_accumulate_grad_hook(hook)

    handles = [watch_output(name, module) for name, module in model.named_modules() if name]
    handles += [watch_gradient(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        with contextlib.suppress(DivergedError):
            train_step(model, [], batch, plan)
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return f"first not finite: {found[0]}" if found else ""


@torch.no_grad()
def _not_finite(tensor: Tensor) -> int:
    return int(tensor.numel() - tensor.isfinite().sum())
