"""`tiedgpt doctor`: versions, devices, threads, and missing packages."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Literal

from tiedgpt import __version__
from tiedgpt.cli.options import parse
from tiedgpt.errors import EXIT_OK

NEEDED = (
    "torch", "numpy", "safetensors", "tokenizers", "tiktoken", "huggingface_hub", "rich", "plotext",
    "tyro",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show versions, devices and threads."""

    format: Literal["human", "json"] = "human"
    """json: one object."""


def run(arguments: list[str]) -> int:
    """Show the state of the installation; return the exit code."""
    given = parse(Arguments, "doctor", arguments, "Show versions, devices, threads.")
    report = examine()
    if given.format == "json":
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:<26}  {value}")
    return EXIT_OK


def examine() -> dict[str, Any]:
    """Return versions, devices and threads of this machine as plain data."""
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
    affinity = getattr(os, "sched_getaffinity", None)
    report["cores"] = len(affinity(0)) if affinity else os.cpu_count()
    if not missing:
        import torch

        from tiedgpt.core.config import GPTConfig
        from tiedgpt.train.plan import faster_dtype, training_device

        device = training_device()
        report["torch threads"] = torch.get_num_threads()
        report["cpu"] = torch.backends.cpu.get_cpu_capability()
        report["device"] = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        )
        report["faster matmul dtype"] = faster_dtype(GPTConfig.preset("gpt2"), device)
    report["compiler for torch.compile"] = shutil.which("g++") or shutil.which("clang++") or "none"
    report["free disk here"] = f"{shutil.disk_usage('.').free / 1e9:.1f} GB"
    report["missing"] = ", ".join(missing) or "nothing"
    return report
