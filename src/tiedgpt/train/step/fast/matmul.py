"""Matmuls by the library that is fastest on this CPU.

`F.linear` and `torch.mm` in fp32 call MKL, which does not use AVX-512 on AMD's CPUs. PyTorch gives
oneDNN only convolutions in fp32: but a linear layer is one, of width 1, over rows that lie as
(N, channels), which is the layout "channels last".

Gain: on a core of AMD's Zen 5, 190 to 230 GFLOP/s instead of 95 for products of 2,048 rows and
widths of 128 to 3,072. Zen 4 computes 512 bits in two halves: there both reach 80 to 105, a step
gains nothing, and MKL is called. On AVX2 alone oneDNN's gradient of weights is slower.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

IMAGES = 16
"""Number of images as which the rows are passed: PyTorch passes fewer to oneDNN only with several
threads."""
LEAST_NUMBERS = 20_480
"""Minimum size of the input; PyTorch does not give smaller convolutions to oneDNN."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """(N, in) and (out, in) -> (N, out): x W^T + b. With `out`, write x W^T there."""
    if not _is_for_onednn(x):
        return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.T, out=out)
    y = F.conv2d(_images(x), weight[:, :, None, None], bias)
    y = y.permute(0, 2, 3, 1).reshape(len(x), len(weight))
    return y if out is None else out.copy_(y)


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """(N, in) and (N, out) -> (out, in): the gradient of W of `linear(x, W)`."""
    if not (_is_for_onednn(x) and _is_for_onednn(grad)):
        return grad.T @ x
    shape = (grad.shape[1], x.shape[1], 1, 1)
    return conv2d_weight(_images(x), shape, _images(grad)).flatten(1)


def add_weight_gradient(sums: Tensor, x: Tensor, grad: Tensor) -> None:
    """Add the gradient (out, in) of W of `linear(x, W)` to `sums`, in place if dtypes are equal."""
    if sums.dtype == x.dtype and not _is_for_onednn(x):
        sums.addmm_(grad.T, x)
    else:
        sums += weight_gradient(x, grad)


def _is_for_onednn(x: Tensor) -> bool:
    """Whether PyTorch lets oneDNN compute with these rows, and that is the faster way."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and len(x) % IMAGES == 0
        and x.numel() > LEAST_NUMBERS
        and is_onednn_faster()
    )


@cache
def is_onednn_faster() -> bool:
    """Whether oneDNN is the faster library: AMD's CPUs with whole AVX-512 units, Zen 5 and on.

    Of the CPUs without them only Intel's Tiger Lake has this instruction, too.
    """
    return (
        bool(torch.cpu.get_capabilities().get("avx512_vp2intersect"))
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
    )


def _images(rows: Tensor) -> Tensor:
    """(N, C) -> (16, C, N / 16, 1), channels last: the same memory."""
    return rows.contiguous().view(IMAGES, -1, 1, rows.shape[1]).permute(0, 3, 1, 2)
