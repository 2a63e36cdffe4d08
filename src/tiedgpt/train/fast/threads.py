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

import torch
from torch import Tensor

from tiedgpt.infer.kernels.compile_cache import Kernel, Step


def are_available() -> bool:
    """Return whether kernels can be compiled and are faster than torch's operations."""
    is_fast = _parallel() is not None or torch.get_num_threads() <= 3
    return is_fast and not os.environ.get("NUMBA_DISABLE_JIT")


def run(kernel: Kernel, *tensors: Tensor) -> None:
    """Call a kernel with contiguous tensors as flat arrays; bf16 is passed as uint16.

    Each thread calls it, and claims chunks by the first counter of its control.
    """
    flat = (tensor.detach().view(-1) for tensor in tensors)
    arrays = (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t for t in flat)
    step = Step(kernel, 0, 1, tuple(array.numpy() for array in arrays))
    parallel, threads = _parallel(), torch.get_num_threads()
    if parallel is None or threads == 1:
        step(0)
    else:  # the function's second argument, the number of the thread, is not read
        parallel(step.function, step.address, threads, 0)


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
