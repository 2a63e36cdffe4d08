"""Facts about the machine and the process, and conversions that several layers need.

Like `errors`, this module imports nothing heavy and every layer may import it. torch is imported
inside the functions that need it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from tiedgpt.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")
R = TypeVar("R")
GPU_MIN_PARAMETERS = 20_000_000
"""Parameters from which a GPU generates faster than the CPU's kernels: an estimate.

For each token, a GPU starts some ten operations a layer, in about 0.3 ms; a CPU with 30 GB/s reads
that many fp32 parameters in the time of six layers.
"""


def device_name(device: object) -> str:
    """Return "auto", "cpu", "mps", "cuda" or "cuda:N" for a name or a torch.device; None is auto.

    Raises `UserError` for another name.
    """
    name = "auto" if device is None else str(device).lower()
    match = re.fullmatch(r"(auto|cpu|mps)|(cpu|mps):0|cuda(:\d+)?", name)
    if match is None:
        raise UserError(f"must be auto, cpu, cuda, cuda:N or mps, got {device!r}", option="device")
    return match[2] or name


def find_device(device: object = "auto") -> torch.device:
    """Return the device of a name; auto: the GPU if there is one, or the CPU.

    Raises `UserError` for a device that this machine does not have.
    """
    import torch

    name = device_name(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
        raise UserError(
            f"{name} cannot be used here: {reason}",
            hint=f"torch finds {', '.join((*gpus, 'cpu'))}",
            option="device",
        ) from None


def device_for_inference(device: object, n_parameters: int) -> torch.device:
    """Return the device for a model of a size.

    auto: the GPU, if there is one, from `GPU_MIN_PARAMETERS` on; otherwise the CPU.
    """
    if device_name(device) == "auto" and n_parameters < GPU_MIN_PARAMETERS:
        device = "cpu"
    return find_device(device)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory(device: torch.device | None = None) -> int | None:
    """Return the free bytes of a GPU, or of the system without `device` or for a CPU.

    For a GPU this includes the memory that torch holds for reuse. Returns None where the system
    does not report a number.
    """
    if device is not None and device.type == "cuda":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    try:
        if sys.platform == "darwin":
            return _free_memory_macos()
        if sys.platform == "win32":
            return _free_memory_windows()
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, AttributeError):  # no such file, library or function
        pass
    return None


def _free_memory_macos() -> int | None:
    """Return the bytes of free and inactive pages by `host_statistics64` (mach/vm_statistics.h)."""
    system = ctypes.CDLL(None)
    host_vm_info64, n_words = 4, 38
    words, size = (ctypes.c_uint32 * n_words)(), ctypes.c_uint32(n_words)
    arguments = (system.mach_host_self(), host_vm_info64, words, ctypes.byref(size))
    if system.host_statistics64(*arguments) != 0:
        return None
    free, _active, inactive = words[:3]
    return (free + inactive) * mmap.PAGESIZE


def _free_memory_windows() -> int | None:
    """Return the free physical bytes by `GlobalMemoryStatusEx` (MEMORYSTATUSEX)."""
    status = (ctypes.c_uint64 * 8)()  # 2 words of 32 bits, the total, the free bytes, ...
    status[0] = ctypes.sizeof(status)
    if not ctypes.CDLL("kernel32").GlobalMemoryStatusEx(status):
        return None
    return status[2]


def has_bf16(device: torch.device) -> bool:
    """Whether a device has bf16 instructions. Emulated bf16 is up to five times as slow."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    limit = torch.backends.cpu.get_cpu_capability()  # also that of ATEN_CPU_CAPABILITY
    if features.get("avx2") and limit in ("AVX2", "DEFAULT"):
        return False
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch a module to eval mode inside the block and restore the mode of each submodule."""
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


def to_json_data(value: Any) -> Any:
    """Return a value that JSON can hold: dataclasses as objects, arrays as nested lists.

    Numbers that are not finite become null. A dataclass field with the metadata `json=False` is
    left out. Numbers of an array keep the digits of its dtype: 0.1, not 0.10000000149011612.
    """
    import numpy as np

    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (tuple, list)):
        return [to_json_data(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json_data(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value) if field.metadata.get("json", True))
        return {name: to_json_data(getattr(value, name)) for name in names}
    if not isinstance(value, np.ndarray):
        return value
    if not np.issubdtype(value.dtype, np.floating):
        return value.tolist()
    if value.dtype != np.float64:
        value = value.astype(str).astype(np.float64)
    return np.where(np.isfinite(value), value, np.array(None)).tolist()


def require_package(name: str, purpose: str) -> Any:
    """Import a package of the extra `formats`; raise `UserError` if it is not installed.

    `purpose` is the operation that needs it: "reading ONNX files".
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {name.partition('.')[0]} ({error})",
            hint="pip install 'tiedgpt[formats]'",
        ) from None


def exhaust(steps: Generator[T, None, R], show: Callable[[T], object] = lambda _: None) -> R:
    """Run a generator to its end, with `show` called for each item; return its value."""
    while True:
        try:
            item = next(steps)
        except StopIteration as end:
            value: R = end.value
            return value
        show(item)
