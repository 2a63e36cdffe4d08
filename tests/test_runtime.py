"""Cores, memory and modes of the process, and results as JSON."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tiedgpt.errors import UserError
from tiedgpt.runtime import (
    GPU_MIN_PARAMETERS,
    count_cores,
    device_for_inference,
    device_name,
    eval_mode,
    find_device,
    free_memory,
    to_json_data,
)


def test_eval_mode_restores_the_mode_of_each_submodule():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].training = False
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        assert not any(part.training for part in model.modules())
        raise ZeroDivisionError
    assert [part.training for part in model.modules()] == [True, True, False, True]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("CPU", "cpu"),
        ("cpu:0", "cpu"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda:1"),
        ("mps:0", "mps"),
        (torch.device("cuda", 3), "cuda:3"),
        (torch.device("mps"), "mps"),
    ],
)
def test_a_device_is_a_name_or_torchs(device, name):
    assert device_name(device) == name


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "meta", "", 0, True])
def test_other_names_of_devices_are_refused(device):
    with pytest.raises(UserError, match=r"^device must be auto, cpu, cuda, cuda:N or mps"):
        device_name(device)


@pytest.mark.parametrize(
    ("device", "n_parameters", "has_gpu", "chosen"),
    [
        ("auto", GPU_MIN_PARAMETERS, True, "cuda:0"),
        ("auto", GPU_MIN_PARAMETERS - 1, True, "cpu"),
        (None, 10**9, True, "cuda:0"),
        ("auto", 10**9, False, "cpu"),
        ("cpu", 10**9, True, "cpu"),
        ("cuda", 1, True, "cuda:0"),
    ],
)
def test_auto_takes_a_gpu_for_large_models(device, n_parameters, has_gpu, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with FakeTensorMode():  # whose tensors may lie on a GPU that is not here
        assert device_for_inference(device, n_parameters) == torch.device(chosen)


def test_a_device_that_this_machine_lacks_is_an_error_with_those_that_it_has():
    with pytest.raises(UserError, match=r"^device cuda:63 cannot be used here") as error:
        find_device("cuda:63")
    assert "cpu" in error.value.hint


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


class MacOS:
    """The two functions of macOS: 1,000 free pages, 5 active and 200 inactive ones."""

    status = 0

    def mach_host_self(self):
        return 7

    def host_statistics64(self, host, flavor, words, size):
        assert (host, flavor, size._obj.value) == (7, 4, len(words))
        words[:3] = 1000, 5, 200
        return self.status


class Windows:
    """The function of Windows: 7 of 16 GB are free."""

    status = 1

    def GlobalMemoryStatusEx(self, memory):
        assert bytes(memory)[:8] == bytes([64, 0, 0, 0, 0, 0, 0, 0])
        memory[1:3] = 16 << 30, 7 << 30
        return self.status


@pytest.mark.parametrize(
    ("platform", "system", "free"),
    [("darwin", MacOS, 1200 * mmap.PAGESIZE), ("win32", Windows, 7 << 30)],
)
def test_free_memory_of_macos_and_windows(monkeypatch, platform, system, free):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: system())
    assert free_memory() == free
    monkeypatch.setattr(system, "status", 1 - system.status)
    assert free_memory() is None


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_free_memory_is_unknown_where_the_system_does_not_report_it(monkeypatch, platform):
    def open_nothing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", open_nothing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(sys, "platform", platform)
    assert free_memory() is None


def test_bf16_is_not_chosen_when_torch_is_limited_to_avx2():
    program = (
        "import torch; from tiedgpt.runtime import has_bf16; print(has_bf16(torch.device('cpu')))"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True
    )
    assert run.stdout.split() == [b"False"]


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
