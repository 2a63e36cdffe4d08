"""Measure as on a CPU of another class: ours and torch masked, llama.cpp built for the class.

    add_class(parser); args = parser.parse_args(); use_class(args)

The libraries read their masks when they are imported, so `use_class` starts the script again in an
environment that holds them. onnxruntime has no mask. llama-cpp-python is built once for a class,
which takes minutes, and kept in ~/.cache/tiedgpt/bench.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CACHE = Path.home() / ".cache" / "tiedgpt" / "bench"
SETTING = "TIEDGPT_BENCH_CLASS"
PACKAGE = "llama-cpp-python"


@dataclass(frozen=True)
class CPUClass:
    """The masks of a class of CPUs."""

    llvm: tuple[str, str]
    """A CPU of the class as LLVM names it, and the features that kernels choose by."""
    torch: tuple[str, str]
    """ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."""
    ctranslate2: str
    """CT2_FORCE_CPU_ISA."""
    ggml: tuple[str, ...] = ()
    """llama.cpp's switches besides those of AVX2."""


CPU_CLASSES = {
    "avx2": CPUClass(("haswell", "+avx2,+fma"), ("avx2", "AVX2"), "AVX2"),
    "avx-vnni": CPUClass(
        ("alderlake", "+avx2,+fma,+avxvnni"), ("avx2", "AVX2_VNNI"), "AVX2", ("AVX_VNNI",)
    ),
    "avx512": CPUClass(
        ("cooperlake", "+avx2,+fma,+avx512f,+avx512vl,+avx512vnni,+avx512bf16"),
        ("avx512", "AVX512_CORE_BF16"), "AVX512",
        ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
    ),
}  # fmt: skip


def add_class(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects a class."""
    parser.add_argument("--class", dest="cpu_class", choices=CPU_CLASSES, help="mask the CPU")


def use_class(args: argparse.Namespace) -> None:
    """Start the script again in the environment of the class that was asked for, if it is not."""
    if args.cpu_class in (None, os.environ.get(SETTING)):
        return
    it = CPU_CLASSES[args.cpu_class]
    masks = dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), it.llvm, strict=True))
    masks |= dict(zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), it.torch, strict=True))
    masks |= {"CT2_FORCE_CPU_ISA": it.ctranslate2, SETTING: args.cpu_class}
    paths = [str(build_llama_cpp(args.cpu_class)), os.environ.get("PYTHONPATH", "")]
    masks["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env=os.environ | masks).returncode)


def build_llama_cpp(cpu_class: str) -> Path:
    """Return the directory of the installed llama-cpp-python as built for a class."""
    version = metadata.version(PACKAGE)
    directory = CACHE / f"{PACKAGE}-{version}-{cpu_class}"
    if not directory.exists():
        print(f"building {directory}", file=sys.stderr)
        switches = [f"-DGGML_{name}=ON" for name in CPU_CLASSES[cpu_class].ggml]
        arguments = " ".join(["-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF", *switches])
        unfinished = directory.with_name(f"unfinished-{directory.name}")
        command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-deps"]
        command += ["--no-binary", PACKAGE, "--target", str(unfinished), f"{PACKAGE}=={version}"]
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run(command, check=True, env=os.environ | {"CMAKE_ARGS": arguments})
        unfinished.rename(directory)
    return directory
