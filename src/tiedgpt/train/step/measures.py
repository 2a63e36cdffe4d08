"""Measurements of training steps: W's two gradient norms, FLOP/s utilization, peak memory.

Keys of metrics.jsonl that begin with `machine_` or end in `_per_second` depend on the machine and
its load; all others are equal whenever a run is repeated.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.train.plan.values import Facts
from tiedgpt.train.step.loss import Model, body_of, predicts_tokens
from tiedgpt.weights.parameters import head_matrix

PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 operations per second by part of NVIDIA's device name; the first match counts."""
MEASURE_EVERY_STEPS = 10
"""Steps between measurements; the first step is measured, too."""


def is_due(step: int) -> bool:
    """Return whether a step, counted from 1, is measured."""
    return step == 1 or step % MEASURE_EVERY_STEPS == 0


class Measures:
    """Measurements of every `MEASURE_EVERY_STEPS`-th step, as additional metrics of the step."""

    def __init__(
        self, model: Model, data: Facts, dtype: str, device: torch.device, n_processes: int
    ) -> None:
        self._device, self._n_processes = device, n_processes
        self._norms = GradientNorms(model)
        peak = peak_flops(device, dtype) if data.unit == "tokens" else None
        self._peak_share = model_flops(model, data.row_tokens) / peak if peak else None

    def watching(self, step: int) -> AbstractContextManager[None]:
        """Measure the gradients of a step, counted from 1, if it is due.

        With several processes, none of them has the whole gradient, and nothing is measured.
        """
        if is_due(step) and self._n_processes == 1:
            return self._norms.watching()
        return contextlib.nullcontext()

    def metrics(self, step: int, units_per_second: float) -> dict[str, float]:
        """Return the measurements of a step, or {} if none was due."""
        if not is_due(step):
            return {}
        metrics = self._norms.metrics()
        if self._peak_share is not None:
            metrics["machine_flops_use"] = units_per_second / self._n_processes * self._peak_share
        if (peak := peak_memory(self._device)) is not None:
            metrics["machine_memory_bytes"] = peak
        return metrics


class GradientNorms:
    """Norms of W's two gradients, from reading and from predicting, in one backward pass.

    dL/dW is the sum of a gradient from reading (each token of the batch adds to its row) and a
    dense gradient from predicting. The first is dL/d(output of the embedding), summed by id; the
    second is the difference. In an untied model, W only reads, and the second norm is the head's.
    """

    def __init__(self, model: Model) -> None:
        self._gpt = body_of(model)
        self._predicts = predicts_tokens(model)
        self._read: list[tuple[Tensor, Tensor]] = []
        self._norms: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the training step inside the block, which starts without gradients."""
        self._read, self._norms = [], {}
        wte, head = self._gpt.wte, self._gpt.head
        hooks: dict[Tensor, Callable[[Tensor], None]] = {wte.weight: self._measure_w}
        matrix = head_matrix(head) if head is not None and self._predicts else None
        if matrix is not None:
            hooks[matrix] = self._measure_head
        with contextlib.ExitStack() as stack:
            stack.enter_context(wte.register_forward_hook(self._watch_output))
            for weight, hook in hooks.items():
                if weight.requires_grad:
                    stack.enter_context(weight.register_post_accumulate_grad_hook(hook))
            yield
        self._read = []

    def metrics(self) -> dict[str, float]:
        """Return the norms before clipping, by key of metrics.jsonl; {} if W is frozen."""
        return {name: float(norm) for name, norm in sorted(self._norms.items())}

    def _watch_output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(self._add_read, inputs[0].flatten()))

    def _add_read(self, ids: Tensor, gradient: Tensor) -> None:
        self._read.append(_sum_by_id(ids, gradient.flatten(0, -2)))

    def _measure_w(self, matrix: Tensor) -> None:
        """Measure W's accumulated gradient after a micro-batch."""
        if not self._read or matrix.grad is None:
            return
        ids, read = _sum_by_id(*(torch.cat(tensors) for tensors in zip(*self._read, strict=True)))
        self._read = [(ids, read)]
        self._norms["grad_norm_w_input"] = torch.linalg.vector_norm(read)
        if self._predicts and self._gpt.head is None:
            rows = matrix.grad[ids]
            matrix.grad[ids] = rows - read
            self._norms["grad_norm_w_output"] = torch.linalg.vector_norm(matrix.grad)
            matrix.grad[ids] = rows  # the same bits as before

    def _measure_head(self, matrix: Tensor) -> None:
        if matrix.grad is not None:
            self._norms["grad_norm_w_output"] = torch.linalg.vector_norm(matrix.grad)


def _sum_by_id(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rows (N, D) of equal ids (N,); return the ids (U,) and the sums (U, D)."""
    unique, indices = torch.unique(ids, return_inverse=True)
    sums = rows.new_zeros(len(unique), rows.shape[1])
    if rows.is_cuda:  # each device has one function with a fixed order of addition
        return unique, sums.index_put_((indices,), rows, accumulate=True)
    return unique, sums.index_add_(0, indices, rows)


def model_flops(model: Model, n_positions: int) -> float:
    """Return the floating-point operations of training on a token: 6 N + 12 L D T.

    N counts the parameters that a token is multiplied with: W only if it predicts, and no positions
    (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B).
    """
    gpt = body_of(model)
    n = sum(parameter.numel() for parameter in model.parameters()) - gpt.wpe.weight.numel()
    if not predicts_tokens(model) or gpt.head is not None:
        n -= gpt.wte.weight.numel()
    return 6.0 * n + 12.0 * len(gpt.h) * gpt.config.n_embd * n_positions


@functools.lru_cache
def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak operations per second: from NVIDIA's data sheet, or measured on a CPU.

    Returns None for an unknown GPU.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        matches = [flops for model, flops in PEAK_FLOPS.items() if model in name]
        return matches[0] if matches and dtype == "bf16" else None
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
