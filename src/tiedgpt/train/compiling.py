"""Blocks compiled by torch: what that needs, and the time that it takes before the first step.

All blocks of a shape share one compiled form, for each shape of their input one, however many there
are. Evaluation and generation run the blocks as they are.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from tiedgpt.train.fast import fast_training
from tiedgpt.train.task import Arrays, Model, loss_terms, on_device

if TYPE_CHECKING:
    from tiedgpt.train.plan import Plan

Compile = Literal["auto", "on", "off"]
COMPILERS = ("g++", "clang++", "c++", "cl")


@functools.cache
def compiled(function: types.FunctionType, shape: torch.Size) -> Callable[..., Any]:
    """Return the function compiled for inputs of a shape.

    It is code of its own for each: torch gives up on a code after eight forms, and the steps of a
    run that goes on, which has fewer behind it, would not have the bits of one that never stopped.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{'_'.join(map(str, shape))}")
    own = types.FunctionType(code, function.__globals__, closure=function.__closure__)
    own.__defaults__, own.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return torch.compile(own, dynamic=False)


def decide(
    asked: Compile, device: torch.device, *, one_shape: bool = True
) -> tuple[bool, str | None]:
    """Return whether to compile here, and where that cannot be, why not.

    "auto" compiles on a GPU, where all batches are of one shape. On CPUs the blocks' own products
    and attention are faster, measured by `bench/train.py --compile`.
    """
    if asked == "off" or (asked == "auto" and not (one_shape and device.type == "cuda")):
        return False, None
    lacks = missing(device)
    if lacks is None:
        return True, None
    return False, f"--compile {asked}: {lacks}; the blocks run as they are"


def missing(device: torch.device) -> str | None:
    """Return what torch.compile lacks on this machine, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is missing (pip install triton)"
    given = os.environ.get("CXX")
    if any(shutil.which(name) for name in ([given] if given else COMPILERS)):
        return None
    return f"no C++ compiler is here ({given or ', '.join(COMPILERS)}): install one or set CXX"


def compile_now(model: Model, batch: Arrays, plan: Plan) -> float:
    """Compile by a loss and its gradient, which are thrown away; return the seconds it took.

    The random streams are left where they were.
    """
    began = time.perf_counter()
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    part = tuple(tensor[: plan.micro_batch] for tensor in on_device(batch, device))
    with torch.random.fork_rng(devices), fast_training(model):
        with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
            sum(loss_terms(model, part), torch.zeros((), device=device)).backward()
    model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
