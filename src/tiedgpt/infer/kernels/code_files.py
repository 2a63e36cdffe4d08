"""Files of machine code: directories, names, writing and loading.

A file is in the cache of this machine, or in the wheel, which holds some for each class of CPUs.
With a C compiler a file is linked to a shared library, which loads in a millisecond. Without one it
is an object file, which LLVM loads (llvmlite: 40 ms and 40 MB). Its name ends in a checksum: a
damaged file is ignored and replaced.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiedgpt.errors import TiedGPTError
from tiedgpt.files import replacing
from tiedgpt.infer.kernels.cpu_targets import read_cpu, this_target

SYMBOL = "tiedgpt_kernel"
"""The function that a file exports."""
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
"""Its type: of the address of a record of arguments, and the number of the thread."""
LINKER = "cc"
"""The program that links shared libraries, if it is installed."""
IN_WHEEL = Path(__file__).parent / "machine_code"
"""The directory of a wheel's files; a checkout does not have it."""
CHECKSUM = "?" * 8
"""The pattern of a checksum: one class's name may begin with another's."""
CPU_LINES = ("model name", "flags", "CPU ", "Features")
"""The lines of /proc/cpuinfo that name a CPU and its features."""
NOT_COMPILED_IN = ("NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")
"""Settings of Numba that machine code does not depend on."""

Function = Callable[[int, int], None]

_alive: list[Any] = []
"""Owners of machine code."""


def cache_directories() -> list[Path]:
    """Return the directories of the cache. Files are written to the first writable one."""
    if directory := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(directory)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(__file__).parent / "__pycache__", Path(home) / "tiedgpt"]


def find(module: str, name: str) -> list[Path]:
    """Return the files of a kernel of a module for this CPU, those of the cache first.

    `name` is the kernel's with a digest of its arguments' types, or a pattern of such names. Where
    Numba's settings ask for other code than this CPU's, files of the wheel are left out.
    """
    key = f"{name}-{digest(module):08x}-*"
    cached = [path for folder in cache_directories() for path in folder.glob(key)]
    if _settings():
        return cached
    shipped = f"{name}-{source_digest(module):08x}-{this_target()}-{CHECKSUM}.*"
    return cached + list(IN_WHEEL.glob(shipped))


def load(module: str, name: str) -> Function | None:
    """Return the function of the first undamaged file that can be loaded, or None."""
    for path in find(module, name):
        with suppress(OSError, RuntimeError, ValueError, AttributeError):
            data = path.read_bytes()
            if zlib.crc32(data) != int(path.stem[-8:], 16):
                continue
            if path.suffix == ".so":
                return FUNCTION((SYMBOL, ctypes.CDLL(str(path.resolve()))))
            return load_object(data)
    return None


def load_object(data: bytes) -> Function:
    """Return the function in an object file, once LLVM has loaded it."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    jit = llvm.create_lljit_compiler(machine, suppress_errors=True)
    library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
    loaded = library.export_symbol(SYMBOL).link(jit, SYMBOL)
    _alive.append((jit, loaded))
    return FUNCTION(loaded[SYMBOL])


def keep(module: str, name: str, data: bytes) -> None:
    """Link an object file, and write it to the first writable directory of the cache.

    Raises the error of the last directory if all fail.
    """
    for folder in (places := cache_directories()):
        try:
            return write(folder, f"{name}-{digest(module):08x}", data)
        except (OSError, TiedGPTError):
            if folder is places[-1]:
                raise


def write(folder: Path, name: str, data: bytes) -> None:
    """Link an object file, and write it to a directory."""
    data, suffix = link(data)
    with replacing(folder / f"{name}-{zlib.crc32(data):08x}{suffix}") as temporary:
        temporary.write_bytes(data)


def link(data: bytes) -> tuple[bytes, str]:
    """Return a shared library and ".so"; without a linker, the object file and ".o"."""
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        file.write_bytes(data)
        command = [LINKER, "-shared", "-s", "-o", str(library), str(file), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return library.read_bytes(), ".so"
    return data, ".o"


@cache
def source_digest(module: str) -> int:
    """Return a digest of the source files of this module's kernels."""
    origins = {__file__, getattr(find_spec(module), "origin", None) or __file__}
    folders = sorted({Path(origin).parent for origin in origins})
    sources = [file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py"))]
    return zlib.crc32(b"".join(sources))


@cache
def digest(module: str) -> int:
    """Return a digest of everything that machine code depends on except the arguments' types."""
    numba = [
        (name, os.stat(spec.origin).st_mtime_ns)
        for name in ("numba", "llvmlite")
        if (spec := find_spec(name)) and spec.origin
    ]
    about = (source_digest(module), sys.platform, _cpu(), numba, _settings())
    return zlib.crc32(repr(about).encode())


def _settings() -> list[tuple[str, str]]:
    """Return Numba's settings, which machine code depends on."""
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name not in NOT_COMPILED_IN
    )


def _cpu() -> str:
    """Return the CPU's name and features as the system, or else LLVM, describes them."""
    if about := read_cpu():
        return "\n".join(line for line in about.split("\n") if line.startswith(CPU_LINES))
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
