"""Cores, memory and modes of the process, and results as JSON."""

import json
import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from tiedgpt.runtime import count_cores, eval_mode, free_memory, to_json_data


def test_eval_mode_restores_the_mode_of_each_submodule():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].training = False
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        assert not any(part.training for part in model.modules())
        raise ZeroDivisionError
    assert [part.training for part in model.modules()] == [True, True, False, True]


def test_cores_are_those_of_the_processs_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert count_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores() == 1


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs Linux")
def test_free_memory_is_less_than_the_memory_of_the_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory() < total
    assert 0 < free_memory(torch.device("cpu")) < total


@dataclass
class Row:
    name: str
    values: np.ndarray
    loss: float = float("nan")
    tensor: object = field(default=None, metadata={"json": False})


def test_results_become_json_with_null_for_non_finite_numbers():
    row = Row("a", np.array([0.1, np.inf], dtype=np.float32), tensor=object())
    data = to_json_data({"rows": (row,), "ids": np.array([[1, 2]])})
    assert data == {
        "rows": [{"name": "a", "values": [0.1, None], "loss": None}],
        "ids": [[1, 2]],
    }
    assert json.loads(json.dumps(data, allow_nan=False)) == data
