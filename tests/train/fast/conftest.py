"""Tests of fast_training tell by calls whether the fast functions are used."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def record_calls(monkeypatch) -> Callable[[ModuleType, str], list[tuple]]:
    """Return a list that receives the arguments of every call of a module's function."""

    def record(module: ModuleType, name: str) -> list[tuple]:
        calls, function = [], getattr(module, name)
        monkeypatch.setattr(module, name, lambda *inputs: calls.append(inputs) or function(*inputs))
        return calls

    return record
