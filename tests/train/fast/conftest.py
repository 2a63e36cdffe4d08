"""Values with their gradients, and the calls of fast functions."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from tiedgpt.infer.kernels.arguments import LINE
from tiedgpt.infer.kernels.compile_cache import Kernel, Step


def value_and_gradients(function: Callable, grad: torch.Tensor, *inputs) -> list[torch.Tensor]:
    """Return a function's value and, for this gradient of it, the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def run_as_thread(thread: int, kernel: Kernel, n_scratch: int, *arguments) -> None:
    """Run a kernel as one of three threads; `...` is the scratch, of which it changes its own."""
    scratch = np.full((5, n_scratch), 7, np.float32)
    arrays = [scratch[1:4].ravel() if a is ... else a for a in arguments]
    step = Step(kernel, 1, 1, (*arrays,))
    step.counters[LINE] = thread
    step(0)
    assert (scratch != 7).any(1).nonzero()[0].tolist() == [step.counters[LINE]] == [1 + thread]


@pytest.fixture
def record_calls(monkeypatch) -> Callable[[ModuleType, str], list[tuple]]:
    """Return a list that receives the arguments of every call of a module's function."""

    def record(module: ModuleType, name: str) -> list[tuple]:
        calls, function = [], getattr(module, name)
        monkeypatch.setattr(module, name, lambda *inputs: calls.append(inputs) or function(*inputs))
        return calls

    return record
