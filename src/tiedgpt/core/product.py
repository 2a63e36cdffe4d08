"""Products in a narrower type than the weights', with as little kept for backward as can be.

Under autocast nn.Linear keeps a copy of its weights in the narrow type until backward has used it:
170 MB of GPT-2's blocks in bf16. Here the weights themselves are kept and cast again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks


class Product(nn.Linear):
    """nn.Linear, (..., in) -> (..., out), that keeps no copy of its weights for backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, in autocast's type where that is on."""
        device = x.device.type
        narrow = torch.is_autocast_enabled(device) and torch.is_grad_enabled()
        if not narrow or torch.compiler.is_compiling():
            return super().forward(x)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _Product.apply(x, self.weight, self.bias, dtype)  # type: ignore[no-untyped-call]


def recomputed(tensor: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """While this context lasts, keep for backward how to compute `tensor` again, not itself."""
    place, size = tensor.data_ptr(), tensor.numel()

    def pack(kept: Tensor) -> Tensor | tuple[int, ...]:
        is_it = kept.data_ptr() == place != 0 and kept.numel() == size
        return tuple(kept.shape) if is_it else kept

    def unpack(packed: Tensor | tuple[int, ...]) -> Tensor:
        return packed if isinstance(packed, Tensor) else compute().view(packed)

    return saved_tensors_hooks(pack, unpack)


class _Product(torch.autograd.Function):
    """x W^T + b with all three cast to `dtype`; gradients in the types of what they are of."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        narrow = x.to(dtype)
        ctx.save_for_backward(narrow, weight)
        ctx.x_dtype = x.dtype
        ctx.has_bias = bias is not None
        return F.linear(narrow, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.to(grad.dtype)).to(ctx.x_dtype)
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            grad_w = (rows.T @ x.flatten(0, -2)).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_b = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        return grad_x, grad_w, grad_b, None
