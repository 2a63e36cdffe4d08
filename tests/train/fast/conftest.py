"""Values with their gradients, and the calls of fast functions."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch


def value_and_gradients(function: Callable, grad: torch.Tensor, *inputs) -> list[torch.Tensor]:
    """Return a function's value and, for this gradient of it, the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.fixture
def record_calls(monkeypatch) -> Callable[[ModuleType, str], list[tuple]]:
    """Return a list that receives the arguments of every call of a module's function."""

    def record(module: ModuleType, name: str) -> list[tuple]:
        calls, function = [], getattr(module, name)
        monkeypatch.setattr(module, name, lambda *inputs: calls.append(inputs) or function(*inputs))
        return calls

    return record
