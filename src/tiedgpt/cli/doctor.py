"""`tiedgpt doctor`: versions, devices, threads, and what each optional feature needs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import Any, Literal

from tiedgpt import __version__
from tiedgpt.cli.console import table, waiting
from tiedgpt.cli.options import parse
from tiedgpt.files import format_bytes
from tiedgpt.options import option
from tiedgpt.runtime import (
    GPU_MIN_PARAMETERS,
    count_cores,
    find_device,
    free_memory,
    has_bf16,
)
from tiedgpt.weights.checkpoint import Format
from tiedgpt.weights.registry import formats

NEEDED = tuple(
    "torch numpy numba safetensors tokenizers tiktoken huggingface_hub rich plotext".split()
)
FEATURES = {
    "Parquet files, zstd": (("pyarrow",), "pip install 'tiedgpt[data]'"),
    "hf: data sets": (("datasets",), "pip install 'tiedgpt[data]'"),
    "data prepare --ray": (("ray",), "pip install 'tiedgpt[ray]'"),
    "generate --regex": (("llguidance",), "pip install 'tiedgpt[constrain]'"),
    "plot --out": (("matplotlib",), "pip install 'tiedgpt[plot]'"),
    "serve": (("fastapi",), "pip install 'tiedgpt[serve]'"),
    "eval --tasks": (("lm_eval",), "pip install 'tiedgpt[eval]'"),
    "train --track": (("trackio", "wandb", "tensorboard"), "pip install 'tiedgpt[track]'"),
    "transformers, in Python": (("transformers",), "pip install transformers"),
    "LoRA by PEFT, in Python": (("peft",), "pip install peft"),
}
"""Optional features, the packages that provide each, and the command that installs one."""
CPU_FEATURES = {
    "AVX2": ("avx2", "kernels and torch compute 4 numbers at a time"),
    "AVX-512": ("avx512f", "kernels and torch compute 8 numbers at a time"),
    "bf16": ("avx512bf16", "kernels convert bf16 as they read it; train in fp32"),
}
"""CPU features that speed up kernels on x86, their names in LLVM, and the cost without them."""
BYTE_CLASSES = {
    "avx512-vnni": "1 instruction for 64 products, the fastest class",
    "avx-vnni": "1 instruction for 32 products; AVX-512 VNNI would take 1 for 64",
    "avx2": "4 instructions for 32 products; AVX-VNNI would take 1, AVX-512 VNNI 1 for 64",
    "arm-i8mm": "1 instruction for 16 products, the fastest class on ARM",
    "arm-dotprod": "1 instruction for 16 products; i8mm would save 1 for 16 int8 weights",
    "plain": "several times as slow as with AVX2 or AVX-VNNI (x86) or dotprod (ARM)",
}
"""Classes of kernels for int8 and int4 (`simd.BYTE_DOTS`), and the gain of a better CPU."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show versions, devices, threads and optional features."""

    format: Literal["human", "json"] = option("human", "json: one object.", short="f")


def run(arguments: list[str]) -> None:
    """Show the state of the installation."""
    args = parse(Arguments, "doctor", arguments, str(Arguments.__doc__))
    with waiting("measuring this machine"):
        report = examine()
    if args.format == "json":
        print(json.dumps(report, indent=2))
        return
    parts = {"cpu features": "cpu feature", "formats": "checkpoint format"}
    parts |= {"features": "optional feature"}
    tables = {title: report.pop(name) for name, title in parts.items()}
    for title, rows in {"this machine": report, **tables}.items():
        table((title, ""), [(name, str(value)) for name, value in rows.items()])
        print()


def examine() -> dict[str, Any]:
    """Return versions, devices, threads and features of this machine as plain data."""
    report: dict[str, Any] = {
        "tiedgpt": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    }
    missing = []
    for package in NEEDED:
        try:
            import_module(package)
            report[package] = metadata.version(package)
        except (metadata.PackageNotFoundError, ImportError) as error:
            missing.append(f"{package} ({error})")
    report["cores"] = count_cores()
    if not missing:
        report |= _examine_torch()
    report["free disk here"] = f"{shutil.disk_usage('.').free / 1e9:.1f} GB"
    report["missing"] = ", ".join(missing) or "nothing that is required"
    report["cpu features"] = {} if missing else _describe_cpu()
    report["formats"] = {format.title: _describe_use(format) for format in formats()}
    compiler = shutil.which("g++") or shutil.which("clang++")
    report["features"] = {name: _describe_feature(*needs) for name, needs in FEATURES.items()} | {
        "train --compile": f"yes, by {compiler}" if compiler else "no: install g++ or clang++"
    }
    return report


def _describe_cpu() -> dict[str, str]:
    """Return the class of the kernels, the CPU features they use, and the cost of missing ones."""
    from tiedgpt.infer.kernels.simd import FEATURES, byte_class

    cpu, name = os.environ.get("NUMBA_CPU_NAME") or platform.machine().lower(), byte_class(FEATURES)
    report = {"int8 and int4 kernels": f"{name}: {BYTE_CLASSES[name]}"}
    if cpu not in ("x86_64", "amd64"):
        return report | {"those of": cpu}
    return report | {
        name: "yes" if feature in FEATURES else f"no: {cost}"
        for name, (feature, cost) in CPU_FEATURES.items()
    }


def _examine_torch() -> dict[str, Any]:
    """Return torch's view of this machine, and the origin of the kernels' machine code."""
    import torch

    from tiedgpt.train.machine import choose_dtype

    device = find_device()
    return {
        "torch threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **_describe_gpus(),
        "train --device auto": device.type,
        "train --dtype auto": choose_dtype(device),
        "generate --device auto": _describe_choice(device.type),
        **_describe_kernels(),
    }


def _describe_kernels() -> dict[str, str]:
    """Return which kernels have machine code in the package, or compiled here, and where."""
    from tiedgpt.infer.kernels import code_files, cpu_targets, sampling
    from tiedgpt.infer.packed_session import forward
    from tiedgpt.train.step.fast import attention, dropout, gelu, loss

    kernels = (
        forward, sampling.fill_rows, attention.FORWARD, attention.GRADIENT, dropout.KERNEL,
        gelu.VALUE, gelu.GRADIENT, loss.KERNEL,
    )  # fmt: skip
    shipped, compiled = [], []
    for kernel in kernels:
        files = code_files.find(kernel.module, f"{kernel.name}-*")
        n = sum(file.parent == code_files.IN_WHEEL for file in files)
        if n:
            shipped.append(f"{kernel.name} ({n})")
        if n < len(files):
            compiled.append(f"{kernel.name} ({len(files) - n})")
    target = cpu_targets.this_target()
    in_package = f"{', '.join(shipped)}, for {target}" if shipped else "none"
    return {
        "kernels in the package": in_package,
        "kernels compiled here": ", ".join(compiled) or "none; they are when first used",
        "kernel cache": " or ".join(map(str, code_files.cache_directories())),
    }


def _describe_gpus() -> dict[str, str]:
    """Return the name, memory and bf16 of each GPU, and its driver."""
    import torch

    toolkit = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        build = f"CUDA {toolkit}" if toolkit else "CPUs alone"
        return {"gpu": f"none found; torch is built for {build}"}
    report = {}
    for n in range(torch.cuda.device_count()):
        name, device = torch.cuda.get_device_name(n), torch.device("cuda", n)
        total, free = torch.cuda.get_device_properties(n).total_memory, free_memory(device) or 0
        bf16 = "bf16" if has_bf16(device) else "no bf16"
        report[str(device)] = f"{name}: {format_bytes(total)}, {format_bytes(free)} free, {bf16}"
    return report | {"gpu driver": f"{_read_driver()}; torch is built for CUDA {toolkit}"}


def _read_driver() -> str:
    """Return the version of NVIDIA's driver by its own tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return ", ".join(dict.fromkeys(output.stdout.split()))
    return "unknown (nvidia-smi does not answer)"


def _describe_choice(device: str) -> str:
    """Return the meaning of `--device auto` where training takes this device."""
    if device == "cpu":
        return device
    return f"{device} from {GPU_MIN_PARAMETERS:,} parameters; cpu below, and for int8 and int4"


def _describe_use(format: Format) -> str:
    """Return whether a format is read and written, and the packages that it lacks."""
    does = "read and written" if format.writer else "read"
    missing = [package for package in format.packages if util.find_spec(package) is None]
    needs = f"pip install 'tiedgpt[{format.extra}]' ({', '.join(missing)} is missing)"
    return f"{does}; for all of it: {needs}" if missing else does


def _describe_feature(packages: tuple[str, ...], install: str) -> str:
    """Return the installed package of a feature, or the command that installs one."""
    present = [package for package in packages if util.find_spec(package) is not None]
    return f"yes, by {', '.join(present)}" if present else f"no: {install}"
