"""`tiedgpt doctor`: versions, devices, threads, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from tiedgpt.cli.options import parse
from tiedgpt.errors import EXIT_OK

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "tiktoken", "huggingface_hub", "rich")


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
    import torch

    from tiedgpt.core.config import GPTConfig
    from tiedgpt.train.planning import faster_dtype

    missing = []
    found: dict[str, Any] = {"tiedgpt": metadata.version("tiedgpt")}
    found["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in NEEDED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    found["cores"] = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    found["torch threads"] = torch.get_num_threads()
    found["cpu"] = torch.backends.cpu.get_cpu_capability()
    found["gpu"] = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else "none"
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found["faster products"] = faster_dtype(GPTConfig.preset("gpt2"), device)
    found["compiler for torch.compile"] = shutil.which("g++") or shutil.which("clang++") or "none"
    found["free disk here"] = f"{shutil.disk_usage('.').free / 1e9:.1f} GB"
    found["missing"] = missing or "nothing"
    return found
