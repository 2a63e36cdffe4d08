"""Measurements beside the loss: the two gradients of W, the use of the machine, its memory.

Names that begin with `machine_` or end in `_per_second` tell of the machine and of the moment;
everything else in metrics.jsonl is the same whenever the run is repeated.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import sys
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.runtime import count_cores
from tiedgpt.train.objective import Data, Model, body_of, predicts_tokens
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Plan
from tiedgpt.weights.parameters import head_matrix

PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 operations a second by NVIDIA's names; the first that is part of a name counts."""
EVERY = 10
"""Steps between measurements; the first step is measured, too."""


def is_due(step: int) -> bool:
    """Whether a step, counted from 1, is measured."""
    return step == 1 or step % EVERY == 0


class Measures:
    """Measurements of every `EVERY`-th step, as additional metrics of the step."""

    def __init__(self, model: Model, data: Data, plan: Plan, world: World) -> None:
        self._world, self._gradients = world, GradientsOfW(model)
        peak = peak_flops(world.device, plan.dtype) if data.unit == "tokens" else None
        self._flops = model_flops(model, data.row_tokens) / peak if peak else None

    def watching(self, step: int) -> AbstractContextManager[None]:
        """Watch a step, counted from 1, if it is due; several processes have no whole gradient."""
        if is_due(step) and self._world.size == 1:
            return self._gradients.watching()
        return contextlib.nullcontext()

    def metrics(self, step: int, units_per_second: float) -> dict[str, float]:
        """Return the measurements of a step, or {} if none was due."""
        if not is_due(step):
            return {}
        measured = self._gradients.norms()
        if self._flops is not None:
            measured["machine_flops_use"] = units_per_second / self._world.size * self._flops
        if (peak := peak_memory(self._world.device)) is not None:
            measured["machine_memory_bytes"] = peak
        return measured


class GradientsOfW:
    """The norms of the two gradients of W, from reading and predicting, in one backward pass.

    dL/dW = (from reading: a sum over the batch's tokens, each into its row) + (from predicting:
    dense). The first is dL/d(what the embedding returned), added up by id; the second is the
    difference. With a head of its own W only reads, and the second is that of the head's matrix.
    """

    def __init__(self, model: Model) -> None:
        self._gpt = body_of(model)
        self._predicts = predicts_tokens(model)
        self._read: list[tuple[Tensor, Tensor]] = []
        self._norms: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure a training step inside the block, which begins without gradients."""
        self._read, self._norms = [], {}
        wte, head = self._gpt.wte, self._gpt.head
        hooks: dict[Tensor, Callable[[Tensor], None]] = {wte.weight: self._arrived}
        matrix = head_matrix(head) if head is not None and self._predicts else None
        if matrix is not None:
            hooks[matrix] = self._head_arrived
        with contextlib.ExitStack() as watched:
            watched.enter_context(wte.register_forward_hook(self._reads))
            for weight, hook in hooks.items():
                if weight.requires_grad:
                    watched.enter_context(weight.register_post_accumulate_grad_hook(hook))
            yield
        self._read = []

    def norms(self) -> dict[str, float]:
        """Return them as they stand in metrics.jsonl, before clipping; {} where W is frozen."""
        return {name: float(norm) for name, norm in sorted(self._norms.items())}

    def _reads(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(self._keep, inputs[0].flatten()))

    def _keep(self, ids: Tensor, gradient: Tensor) -> None:
        self._read.append(_by_id(ids, gradient.flatten(0, -2)))

    def _arrived(self, matrix: Tensor) -> None:
        """W has its gradient of all parts of the batch up to now."""
        if not self._read or matrix.grad is None:
            return
        parts = zip(*self._read, strict=True)
        ids, read = _by_id(*(torch.cat(part) for part in parts))
        self._read = [(ids, read)]
        self._norms["grad_norm_w_input"] = torch.linalg.vector_norm(read)
        if self._predicts and self._gpt.head is None:
            whole = matrix.grad[ids]
            matrix.grad[ids] = whole - read
            self._norms["grad_norm_w_output"] = torch.linalg.vector_norm(matrix.grad)
            matrix.grad[ids] = whole  # bit for bit what it was

    def _head_arrived(self, matrix: Tensor) -> None:
        if matrix.grad is not None:
            self._norms["grad_norm_w_output"] = torch.linalg.vector_norm(matrix.grad)


def _by_id(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the rows (N, D) of equal ids (N,); return the ids (U,) and sums (U, D)."""
    unique, place = torch.unique(ids, return_inverse=True)
    sums = rows.new_zeros(len(unique), rows.shape[1])
    if rows.is_cuda:  # on either device the one whose order of adding does not change
        return unique, sums.index_put_((place,), rows, accumulate=True)
    return unique, sums.index_add_(0, place, rows)


def model_flops(model: Model, n_positions: int) -> float:
    """Return the floating-point operations of training on a token: 6 N + 12 L D T.

    N counts what a token is multiplied with: W where it predicts, not where it only reads, and no
    positions (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B).
    """
    gpt = body_of(model)
    n = sum(parameter.numel() for parameter in model.parameters()) - gpt.wpe.weight.numel()
    if not predicts_tokens(model) or gpt.head is not None:
        n -= gpt.wte.weight.numel()
    return 6.0 * n + 12.0 * gpt.config.n_layer * gpt.config.n_embd * n_positions


@functools.lru_cache
def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak operations per second: of NVIDIA's data sheet, or measured on a CPU.

    None where it is not known.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [flops for part, flops in PEAK_FLOPS.items() if part in name]
        return known[0] if known and dtype == "bf16" else None
    n = 1024
    x = torch.ones(n, n, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, device=device)
    seconds = min(timeit.repeat(functools.partial(F.linear, x, x), number=1, repeat=5))
    return 2.0 * n**3 / seconds


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process on the device, or None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe() -> dict[str, Any]:
    """Return facts about the hardware for run.toml."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": count_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    """Return the name of the processor, if the system says it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name\s*: *(.+)", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()
