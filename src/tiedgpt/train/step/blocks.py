"""Leaner and faster layers, in place of a model's own while steps are done.

Only the class of the modules changes, so parameters, their names and checkpoints stay the same, and
evaluation and generation run the plain layers. All compiled blocks share one compiled form for each
shape of their input. A recomputed block stores only its input until its backward pass (activation
checkpointing, Chen et al. 2016, arXiv 1604.06174); the gradients are the same bit for bit, dropout
included. `train/step/fast` has the other layers.
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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tiedgpt.core.cache import KVCache
from tiedgpt.core.layers import Block
from tiedgpt.errors import DivergedError
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.fast import SUBSTITUTES
from tiedgpt.train.step.loss import Arrays, Loss, Model
from tiedgpt.train.step.step import train_step
from tiedgpt.train.step.substitute import Substitute, substitute

COMPILERS = ("g++", "clang++", "c++", "cl")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of `mallopt` in <malloc.h>."""


@contextlib.contextmanager
def training_layers(model: Model, plan: Plan) -> Iterator[None]:
    """Train with faster layers inside the block, and blocks compiled or recomputed by the plan.

    The allocator's settings are those of the plan from then on.
    """
    if plan.memory is not None or plan.recompute == "blocks":
        return_memory_at_once()
    else:
        keep_memory()
    block = BLOCKS.get((plan.compile, plan.recompute))
    with substitute(model, SUBSTITUTES | ({} if block is None else {Block: block})):
        yield


class RecomputedBlock(Substitute, Block):
    """A block that is recomputed in backward."""

    @override
    def forward(
        self, x: Tensor, layer: int, past: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return _compute(self, Block.forward, True, x, layer, past, mask)


class CompiledBlock(Substitute, Block):
    """A block that is compiled."""

    @override
    def forward(
        self, x: Tensor, layer: int, past: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        run = compile_for_shape(Block.forward, x.shape)
        return _compute(self, run, False, x, layer, past, mask)


class CompiledRecomputedBlock(Substitute, Block):
    """A block that is compiled, and recomputed in backward."""

    @override
    def forward(
        self, x: Tensor, layer: int, past: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        run = compile_for_shape(Block.forward, x.shape)
        return _compute(self, run, True, x, layer, past, mask)


BLOCKS: dict[tuple[str, str], type[Substitute]] = {
    ("off", "blocks"): RecomputedBlock,
    ("on", "off"): CompiledBlock,
    ("on", "blocks"): CompiledRecomputedBlock,
}
"""The blocks by `Plan.compile` and `Plan.recompute`."""


def _compute(
    block: Block,
    run: Callable[..., Tensor],
    is_recomputed: bool,
    x: Tensor,
    layer: int,
    past: KVCache | None,
    mask: Tensor | None,
) -> Tensor:
    """Return a block's output (B, T, D), computed by `run` if gradients are recorded."""
    if past is not None or not torch.is_grad_enabled():
        return Block.forward(block, x, layer, past, mask)
    if not is_recomputed:
        return run(block, x, layer, past, mask)
    y: Tensor = checkpoint(run, block, x, layer, past, mask, use_reentrant=False)
    return y


def _set_malloc(option: int, value: int) -> bool:
    """Return whether glibc took a value."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(option, value))


def return_memory_at_once() -> None:
    """Make glibc return freed tensors of a megabyte and more to the system at once.

    By default, glibc raises that limit to 32 MB as a program frees large blocks, and keeps smaller
    blocks: a step with recomputed blocks took twice the memory of its tensors.
    """
    _set_malloc(M_MMAP_THRESHOLD, 1 << 20)
    _set_malloc(M_TRIM_THRESHOLD, 128 << 10)


def keep_memory(set_malloc: Callable[[int, int], bool] = _set_malloc) -> None:
    """Make glibc keep freed tensors for the next ones of their size.

    By default, glibc returns them, and the next step waits for the same pages: in a virtual machine
    a fifth of the time of a step of `little`.
    """
    largest = 1 << 30, 32 << 20  # older ones take no more than 32 MB
    if any(set_malloc(M_MMAP_THRESHOLD, size) for size in largest):
        set_malloc(M_TRIM_THRESHOLD, 2**31 - 1)


@functools.cache
def compile_for_shape(function: types.FunctionType, shape: torch.Size) -> Callable[..., Any]:
    """Return the function compiled for inputs of a shape.

    Each shape has its own code object: torch compiles a code object at most eight times, so a
    resumed run, with fewer shapes before it, would differ from an uninterrupted one.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{'_'.join(map(str, shape))}")
    renamed = types.FunctionType(code, function.__globals__, closure=function.__closure__)
    renamed.__defaults__, renamed.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return torch.compile(renamed, dynamic=False)


def find_missing(device: torch.device) -> str | None:
    """Return what torch.compile lacks on this machine, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is missing (pip install triton)"
    compiler = os.environ.get("CXX")
    if any(shutil.which(name) for name in ([compiler] if compiler else COMPILERS)):
        return None
    return f"no C++ compiler is here ({compiler or ', '.join(COMPILERS)}): install one or set CXX"


def compile_now(objective: Loss, model: Model, batch: Arrays, plan: Plan) -> float:
    """Compile the blocks by a step without an update; return its seconds.

    The random streams stay unchanged.
    """
    began = time.perf_counter()
    device = next(model.parameters()).device
    micro_batch = tuple(array[: plan.micro_batch] for array in batch)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with contextlib.suppress(DivergedError), training_layers(model, plan):
            train_step(model, [], micro_batch, plan, objective=objective)
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - began
