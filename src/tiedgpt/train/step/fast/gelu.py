"""GELU and its gradient on a CPU, by the vector functions of the inference kernels.

torch's approximation by tanh calculates an exact tanh. x / (1 + e^-2u) is the same formula with one
exponential, and differs from it by 5e-7 at most.

Gain: forward and backward take 0.32x the time of torch's operations in fp32, 0.38x in bf16. Steps
of `tiny` and `little` take 0.97x in fp32, 0.93x and 0.95x in bf16 (two cores of an Intel Xeon with
AVX-512). The first run on a machine compiles both kernels in a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiedgpt.core.layers import ACTIVATION_FUNCTIONS, MLP
from tiedgpt.core.loss import is_plain_autograd
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.train.step.fast.threads import can_run, prepare, run
from tiedgpt.train.step.substitute import Substitute

GELU = ACTIVATION_FUNCTIONS["gelu_new"]
VALUE = Kernel("tiedgpt.train.step.kernels.elementwise", "gelu")
GRADIENT = Kernel("tiedgpt.train.step.kernels.elementwise", "gelu_gradient")


class VectorMLP(Substitute, MLP):
    """An MLP that computes GELU by our kernels while it is trained on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        z = self.c_fc(x)
        is_fast = self.activation is GELU and can_run(z)
        return self.c_proj(gelu(z.contiguous()) if is_fast else self.activation(z))


class _GELU(torch.autograd.Function):
    """GELU, approximated by tanh."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        y = torch.empty_like(z)
        prepare(GRADIENT, z, y, y)
        run(VALUE, z, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain_autograd(grad):
            gradient: Tensor = torch.ops.aten.gelu_backward(grad, z, approximate="tanh")
            return gradient
        out = torch.empty_like(z)
        run(GRADIENT, z, grad.contiguous(), out)
        return out


gelu: Callable[[Tensor], Tensor] = _GELU.apply
"""GELU of a contiguous fp32 or bf16 tensor; its size is a multiple of 16."""
