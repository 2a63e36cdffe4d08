"""A training step, its blocks, and the recent losses that decide whether a run goes on.

A step computes the gradient of a batch in micro-batches, clips it and updates the weights. Every
checkpoint holds the `RunState`, so a resumed run ends or fails at the same step as an uninterrupted
one.

In training, blocks may be compiled or recomputed. Only the class of the modules changes, so
parameters, their names and checkpoints stay the same, and evaluation and generation run the plain
blocks. All compiled blocks share one compiled form for each shape of their input. A recomputed
block stores only its input until its backward pass (activation checkpointing, Chen et al. 2016,
arXiv 1604.06174); the gradients are the same bit for bit, dropout included.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from tiedgpt.core.cache import KVCache
from tiedgpt.core.layers import Block
from tiedgpt.errors import CorruptInputError, DivergedError, NoRoomError
from tiedgpt.train.distributed import Processes
from tiedgpt.train.objective import OWN_LOSS, Arrays, Loss, Model, body_of
from tiedgpt.train.planning import Plan

MAX_SKIPPED_STEPS, SKIP_WINDOW_STEPS = 10, 200
"""Number of skipped steps among the last `SKIP_WINDOW_STEPS` that ends a run."""
RECENT_STEPS = 100
"""Number of losses and gradient norms in a `RunState`."""
SHOWN_STEPS = 5
"""Number of losses and gradient norms in an error message."""
WORSE_RATIO = 1.01
"""Ratio to the best validation loss above which a loss counts as worse."""
STALE_EVALUATIONS = 3
"""Number of evaluations without improvement that ends a run, if the newest loss is `WORSE_RATIO`
times the best."""

COMPILERS = ("g++", "clang++", "c++", "cl")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of `mallopt` in <malloc.h>."""
Accelerate = Callable[[Model], AbstractContextManager[Any]]
"""Function that makes steps on a model faster inside its block, such as `fast_training`."""


@dataclass(frozen=True)
class StepResult:
    """The loss and gradient norm of a step, before its update."""

    loss: float
    """The loss of the batch: mean cross-entropy, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""


def train_step(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Arrays,
    plan: Plan,
    processes: Processes | None = None,
    *,
    objective: Loss = OWN_LOSS,
) -> StepResult:
    """Update the model on a batch, by the loss of an objective or by the model's own.

    Rows without a target are left out. If the model was placed on several `processes`, each
    computes its share.

    Raises `DivergedError`, and leaves the weights as they were, where loss or gradient are not
    finite, or the batch has no targets.
    """
    device = body_of(model).wte.weight.device
    processes = processes or Processes(device)
    module = processes.loss_module(model)
    loss = torch.zeros((), device=device)
    model.zero_grad(set_to_none=True)
    if not any(objective.n_targets(batch)):
        raise DivergedError("the batch has no targets")
    for part in processes.micro_batches(objective, batch, plan.micro_batch):
        with processes.gradient_sync(part):
            with torch.autocast(device.type, plan.autocast, enabled=plan.autocast is not None):
                part_loss = module(*part.rows, objective=objective, shares=part.shares)
            part_loss.backward()
        loss += part_loss.detach()
    loss = processes.sum(loss) / processes.size
    norm = processes.clip(model.parameters(), plan.grad_clip)
    result = StepResult(float(loss), float(norm))
    if not np.isfinite([result.loss, result.grad_norm]).all():
        model.zero_grad(set_to_none=True)
        raise DivergedError(f"the loss became {result.loss}, its gradient {result.grad_norm}")
    try:
        for optimizer in optimizers:
            optimizer.step()
    except torch.OutOfMemoryError:  # some weights are updated: the step cannot be repeated
        raise NoRoomError(
            f"{device} has no room for the optimizer state", hint="use a smaller --micro-batch"
        ) from None
    return result


@dataclass
class RunState:
    """Recent losses, skipped steps and validation scores of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_loss: float | None = None
    skipped: list[int] = field(default_factory=list)
    """Skipped steps among the last `SKIP_WINDOW_STEPS`."""
    skipped_in_all: int = 0
    """Number of skipped steps of the run."""
    best_step: int | None = None
    """Step with the best validation loss; its checkpoint is kept."""
    best_loss: float = math.inf
    stale: int = 0
    """Number of evaluations since the best."""
    newest_loss: float = math.inf
    evaluation_due: bool = False
    """Whether a stop interrupted the evaluation after the last step."""

    def to_save(self) -> dict[str, Any]:
        """Return the fields that have a value, as plain data for a checkpoint."""
        return {k: v for k, v in asdict(self).items() if v not in (None, math.inf)}

    def add_step(self, loss: float, norm: float) -> None:
        """Add the loss and the gradient norm of a step."""
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.losses = [*self.losses, loss][-RECENT_STEPS:]
        self.norms = [*self.norms, norm][-RECENT_STEPS:]

    def add_skip(self, step: int) -> None:
        """Add a skipped step."""
        self.skipped.append(step)
        self.skipped_in_all += 1

    def add_evaluation(self, step: int, loss: float) -> bool:
        """Add a validation loss; return whether it is the best so far."""
        self.newest_loss = loss
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.stale = step, loss, 0
            return True
        self.stale += 1
        return False

    def reopen(self, step: int, loss: float) -> None:
        """Add the final validation loss of a finished run that is prolonged."""
        self.add_evaluation(step, loss)
        self.stale = 0

    def is_over(self, plan: Plan) -> bool:
        """Return whether validation ends the run: out of patience, or rising again."""
        if plan.keep == "last" or not plan.can_end_early:
            return False
        if plan.patience is not None:
            return self.stale >= plan.patience
        return self.stale >= STALE_EVALUATIONS and self.newest_loss > WORSE_RATIO * self.best_loss

    def require_sound(self, step: int) -> None:
        """Raise `DivergedError` after too many skipped steps or if the mean loss has grown."""
        self.skipped = [skipped for skipped in self.skipped if skipped > step - SKIP_WINDOW_STEPS]
        if len(self.skipped) >= MAX_SKIPPED_STEPS:
            raise DivergedError(
                f"{len(self.skipped)} of the last {SKIP_WINDOW_STEPS} steps had no finite loss or "
                "gradient"
            )
        if self.first_loss is not None and len(self.losses) == RECENT_STEPS:
            mean = math.fsum(self.losses) / RECENT_STEPS
            if mean > 2 * self.first_loss + 1:
                raise DivergedError(
                    f"the mean loss of the last {RECENT_STEPS} steps is {mean:.3f}, and the first "
                    f"was {self.first_loss:.3f}"
                )

    def __str__(self) -> str:
        if not self.norms:
            return "no step was done before"
        norms = ", ".join(f"{norm:.3g}" for norm in self.norms[-SHOWN_STEPS:])
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses[-SHOWN_STEPS:])
        return f"losses before: {losses}; gradient norms before: {norms}"


def read_state(state: Mapping[str, Any]) -> tuple[RunState, Plan]:
    """Return the `RunState` and the plan in a checkpoint's state."""
    try:
        return RunState(**state["run"]), Plan(**state["plan"])
    except (KeyError, TypeError):
        raise CorruptInputError(
            "the checkpoint was written by another version of tiedgpt"
        ) from None


def find_not_finite_weights(model: Model) -> str | None:
    """Return the name of the first parameter whose local shard is not finite, or None."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not bool(local.isfinite().all()):
            return name
    return None


def find_not_finite(model: Model, objective: Loss, batch: Arrays, plan: Plan) -> str:
    """Compute the batch again; return the first tensor that is not finite as a clause, or ""."""
    for name, parameter in model.named_parameters():
        if n := _count_not_finite(parameter):
            return f"; first not finite: the weights {name} ({n:,} of {parameter.numel():,})"
    tensors: list[str] = []

    def look(what: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and (n := _count_not_finite(tensor)):
            tensors.append(f"{what} ({n:,} of {tensor.numel():,})")

    def watch(name: str, part: nn.Module | nn.Parameter) -> RemovableHandle:
        if isinstance(part, nn.Module):
            return part.register_forward_hook(lambda *args: look(f"the output of {name}", args[-1]))
        return part.register_post_accumulate_grad_hook(
            lambda parameter: look(f"the gradient of {name}", parameter.grad)
        )

    with contextlib.ExitStack() as watched:
        for name, part in (*model.named_modules(), *model.named_parameters()):
            if name and (isinstance(part, nn.Module) or part.requires_grad):
                watched.enter_context(watch(name, part))
        with contextlib.suppress(DivergedError):
            train_step(model, [], batch, plan, objective=objective)
    model.zero_grad(set_to_none=True)
    return f"; first not finite: {tensors[0]}" if tensors else ""


@torch.no_grad()
def _count_not_finite(tensor: Tensor) -> int:
    return int(tensor.numel() - tensor.isfinite().sum())


# Blocks


def prepare_blocks(model: Model, plan: Plan) -> Model:
    """Compile or recompute the blocks by the plan when gradients are enabled; return the model."""
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


class TrainedBlock(Block):
    """A block that is compiled or recomputed in backward, or both, in training."""

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
        y: Tensor = checkpoint(run, self, x, layer, past, mask, use_reentrant=False)
        return y

    def extra_repr(self) -> str:
        """Return the modes of the block for `print(model)`."""
        done = ("compiled", self.compiled), ("recomputed in backward", self.recompute)
        return ", ".join(what for what, is_done in done if is_done)


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
        with contextlib.suppress(DivergedError):
            train_step(model, [], micro_batch, plan, objective=objective)
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - began
