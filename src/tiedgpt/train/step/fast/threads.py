"""Kernels on the threads of torch's OpenMP.

These threads spin for some milliseconds after a parallel operation, so that threads of our own
would have to share the cores with them.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.loss import is_plain_autograd
from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.compile_cache import Kernel, Step


def suits_kernels(x: Tensor) -> bool:
    """Return whether kernels can compute a function of x, faster than torch's operations.

    x is in fp32 or bf16 on a CPU, and its size is a multiple of 16.
    """
    is_fast = _parallel() is not None or torch.get_num_threads() <= 3
    is_compiled = is_fast and not os.environ.get("NUMBA_DISABLE_JIT")
    has_suitable_type = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    return is_compiled and has_suitable_type and x.numel() % LANES == 0


def can_run(x: Tensor) -> bool:
    """Return whether kernels can compute a function of x and its gradient in a backward pass."""
    is_trained = type(x) is Tensor and x.requires_grad and torch.is_grad_enabled()
    return is_trained and is_plain_autograd(x) and suits_kernels(x)


def run(kernel: Kernel, *arguments: Tensor | int | np.float32) -> None:
    """Call a kernel with numbers, and contiguous tensors as flat arrays; bf16 is passed as uint16.

    Each thread calls it, and claims chunks by the first counter of its control.
    """
    step = Step(kernel, 1, 1, _flatten(arguments))
    parallel, threads = _parallel(), torch.get_num_threads()
    if parallel is None or threads == 1:
        step(0)
    else:  # the function's second argument, the number of the thread, is not read
        parallel(step.function, step.address, threads, 0)


def prepare(kernel: Kernel, *arguments: Tensor | int | np.float32) -> None:
    """Load a kernel that will run with such arguments, or start to compile it beside other work."""
    if not kernel.functions:
        kernel.prepare(*_flatten(arguments))


def _flatten(arguments: tuple[Tensor | int | np.float32, ...]) -> tuple[Any, ...]:
    """Return numbers, and tensors' numbers as NumPy arrays without copying them."""
    return tuple(_flat(a) if isinstance(a, Tensor) else a for a in arguments)


def _flat(tensor: Tensor) -> Any:
    flat = tensor.detach().view(-1)
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


@cache
def _parallel() -> Any:
    """Return the function `GOMP_parallel` of torch's OpenMP, or None if it is not accessible."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel
