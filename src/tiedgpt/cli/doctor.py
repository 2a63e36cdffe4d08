"""`tiedgpt doctor`: versions, devices, threads, and what is missing."""

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
    "torch", "numpy", "safetensors", "tokenizers", "tiktoken", "huggingface_hub", "rich", "tyro",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show versions, devices and threads."""

    format: Literal["human", "json"] = "human"
    """json: one object."""


def run(arguments: list[str]) -> int:
    """Show the state of the installation; return the exit code."""
    given = parse(Arguments, "doctor", arguments, "Versions, devices, threads, what is missing.")
    found = examine()
    if given.format == "json":
        print(json.dumps(found, indent=2))
        return EXIT_OK
    width = max(map(len, found))
    for name, value in found.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name:<{width}}  {shown}")
    return EXIT_OK


def examine() -> dict[str, Any]:
    """Return what there is on this machine, as plain data."""
    missing = []
    found: dict[str, Any] = {"tiedgpt": __version__}
    found["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in NEEDED:
        try:
            found[package] = metadata.version(package)
            import_module(package)
        except (metadata.PackageNotFoundError, ImportError) as error:
            missing.append(f"{package} ({error})")
    affinity = getattr(os, "sched_getaffinity", None)
    found["cores"] = len(affinity(0)) if affinity else os.cpu_count()
    if not missing:
        found |= _of_torch()
    found["compiler for torch.compile"] = shutil.which("g++") or shutil.which("clang++") or "none"
    found["free disk here"] = f"{shutil.disk_usage('.').free / 1e9:.1f} GB"
    found["missing"] = missing or "nothing"
    return found


def _of_torch() -> dict[str, Any]:
    import torch

    from tiedgpt.core.config import GPTConfig
    from tiedgpt.train.planning import faster_dtype, training_device

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpus or "none",
        "faster products": faster_dtype(GPTConfig.preset("gpt2"), training_device()),
    }
