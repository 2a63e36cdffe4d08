"""Measure as on a CPU of another class: ours and torch masked, llama.cpp built for the class.

    add_class(parser); args = parser.parse_args(); use_class(args)

The libraries read their masks when they are imported, so `use_class` starts the script again in an
environment that holds them. onnxruntime has no mask. llama-cpp-python is built once for a class,
which takes minutes, and kept in ~/.cache/tiedgpt/bench. Without a class, nothing is masked and
llama.cpp is built for this CPU: the installed one may be for any (`make`'s is).
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
VARIABLES = (
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
    "CT2_FORCE_CPU_ISA",
)  # fmt: skip
"""The variables of a class's masks, in the order of its fields."""
PACKAGE = "llama-cpp-python"
MISSING = "{} is not installed: pip install 'tiedgpt[bench]', or name other engines with --peers"


@dataclass(frozen=True)
class CPUClass:
    """The masks of a class of CPUs; without any, this CPU."""

    llvm: tuple[str, ...] = ()
    """A CPU of the class as LLVM names it, and the features that kernels choose by."""
    torch: tuple[str, ...] = ()
    """ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."""
    ctranslate2: tuple[str, ...] = ()
    """CT2_FORCE_CPU_ISA."""
    ggml: tuple[str, ...] = ()
    """llama.cpp's switches besides those of AVX2."""


NATIVE = "native"
CPU_CLASSES = {
    NATIVE: CPUClass(ggml=("NATIVE",)),
    "avx2": CPUClass(("haswell", "+avx2,+fma"), ("avx2", "AVX2"), ("AVX2",)),
    "avx-vnni": CPUClass(
        ("alderlake", "+avx2,+fma,+avxvnni"), ("avx2", "AVX2_VNNI"), ("AVX2",), ("AVX_VNNI",)
    ),
    "avx512": CPUClass(
        ("cooperlake", "+avx2,+fma,+avx512f,+avx512vl,+avx512vnni,+avx512bf16"),
        ("avx512", "AVX512_CORE_BF16"), ("AVX512",),
        ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
    ),
}  # fmt: skip


def add_class(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects a class."""
    parser.add_argument(
        "--class", dest="cpu_class", choices=CPU_CLASSES, default=NATIVE, help="mask the CPU"
    )


def use_class(args: argparse.Namespace) -> None:
    """Start the script again in the environment of the class that was asked for, if it is not."""
    if args.cpu_class == os.environ.get(SETTING):
        return
    it = CPU_CLASSES[args.cpu_class]
    masks = dict(zip(VARIABLES, (*it.llvm, *it.torch, *it.ctranslate2), strict=False))
    masks[SETTING] = args.cpu_class
    peers = getattr(args, "peers", None)
    if peers is None or "llama.cpp" in peers:
        paths = [str(build_llama_cpp(args.cpu_class)), os.environ.get("PYTHONPATH", "")]
        masks["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env=os.environ | masks).returncode)


def build_llama_cpp(cpu_class: str) -> Path:
    """Return the directory of the installed llama-cpp-python as built for a class."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SystemExit(MISSING.format("llama.cpp")) from None
    import llvmlite.binding as llvm

    name = llvm.get_host_cpu_name() if cpu_class == NATIVE else cpu_class
    directory = CACHE / f"{PACKAGE}-{version}-{name}"
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
