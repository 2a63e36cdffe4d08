"""How blocks run while they are trained: as they are, compiled, or computed again in backward.

Only the class of the modules changes: parameters, their names and whatever is saved stay as they
are, and evaluation and generation run the blocks as they are.

Compiled, all blocks share one compiled form for each shape of their input. A block that is computed
again keeps only what went into it until backward comes to it (Chen et al. 2016, arXiv 1604.06174);
the gradients are the same bit for bit, dropout included.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tiedgpt.core.cache import KVCache
from tiedgpt.core.layers import Block
from tiedgpt.errors import DivergedError
from tiedgpt.train.objective import Arrays, Loss, Model, body_of
from tiedgpt.train.plan import Plan
from tiedgpt.train.step import train_step

COMPILERS = ("g++", "clang++", "c++", "cl")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of <malloc.h>."""


def prepare_blocks(model: Model, plan: Plan) -> Model:
    """Let the blocks run as planned wherever gradients are wanted; with a cache, as they are."""
    if plan.memory is not None or plan.recompute == "blocks":
        return_memory_at_once()
    else:
        keep_memory()
    if plan.recompute == "off" and plan.compile == "off":
        return model
    for block in body_of(model).h:
        assert isinstance(block, Block)
        block.__class__ = TrainedBlock
        assert isinstance(block, TrainedBlock)
        block.recompute, block.compiled = plan.recompute == "blocks", plan.compile == "on"
    return model


def return_memory_at_once() -> None:
    """Let glibc give back freed tensors of a megabyte and more at once, where it is the C library.

    By itself it raises that limit to 32 MB as a program frees large blocks, and keeps what is
    below in holes: a step with recomputed blocks then took twice the memory that it used.
    """
    _set_malloc(M_MMAP_THRESHOLD, 1 << 20)
    _set_malloc(M_TRIM_THRESHOLD, 128 << 10)


def keep_memory() -> None:
    """Let glibc keep freed tensors for the next ones of their size, where it is the C library.

    By itself it returns them, and the next step waits for the system to hand out the same pages
    again: in a virtual machine a fifth of the time of a step of `little`.
    """
    largest = 1 << 30, 32 << 20  # older ones take no more than 32 MB
    if any(_set_malloc(M_MMAP_THRESHOLD, size) for size in largest):
        _set_malloc(M_TRIM_THRESHOLD, 2**31 - 1)


def _set_malloc(option: int, value: int) -> bool:
    """Return whether glibc took a value."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(option, value))


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
        run = compile_for_shape(Block.forward, x.shape) if self.compiled else Block.forward
        if not self.recompute:
            return run(self, x, layer, past, mask)
        kept: Tensor = checkpoint(run, self, x, layer, past, mask, use_reentrant=False)
        return kept

    def extra_repr(self) -> str:
        """Say in `print(model)` what is done."""
        done = ("compiled", self.compiled), ("computed again in backward", self.recompute)
        return ", ".join(what for what, is_done in done if is_done)


@functools.cache
def compile_for_shape(function: types.FunctionType, shape: torch.Size) -> Callable[..., Any]:
    """Return the function compiled for inputs of a shape.

    It is code of its own for each: torch gives up on a code after eight forms, and the steps of a
    run that goes on, which has fewer behind it, would not have the bits of one that never stopped.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{'_'.join(map(str, shape))}")
    own = types.FunctionType(code, function.__globals__, closure=function.__closure__)
    own.__defaults__, own.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return torch.compile(own, dynamic=False)


def find_missing(device: torch.device) -> str | None:
    """Return what torch.compile lacks on this machine, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is missing (pip install triton)"
    given = os.environ.get("CXX")
    if any(shutil.which(name) for name in ([given] if given else COMPILERS)):
        return None
    return f"no C++ compiler is here ({given or ', '.join(COMPILERS)}): install one or set CXX"


def compile_now(objective: Loss, model: Model, batch: Arrays, plan: Plan) -> float:
    """Compile by a step that changes nothing; return the seconds it took.

    The random streams are left where they were.
    """
    began = time.perf_counter()
    device = next(model.parameters()).device
    part = tuple(array[: plan.micro_batch] for array in batch)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with contextlib.suppress(DivergedError):
            train_step(model, [], part, plan, objective=objective)
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - began
