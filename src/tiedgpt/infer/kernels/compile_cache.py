"""Kernels that Numba compiles once; later processes load their machine code, without Numba.

A kernel's file is named by a digest of all that it depends on: the sources here and beside the
kernel, the types of the arguments, the CPU, and the Numba that is installed. It is a shared library
where a C compiler was there to link it, which loads in a millisecond; else an object file, which
LLVM loads (llvmlite: 40 ms and 40 MB). A file that is damaged or cannot be loaded is ignored, and
replaced.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.files import replacing
from tiedgpt.infer.kernels.arguments import LINE

SYMBOL = "tiedgpt_kernel"
"""The function that a file exports."""
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
"""Its type: of the address of a record of arguments, and the number of the thread."""
CPU_LINES = ("model name", "flags", "CPU ", "Features")
"""The lines of /proc/cpuinfo that name a CPU and its features."""

Kinds = tuple[Any, ...]
"""Types of arguments: the dtype and the number of dimensions of an array, the class of a scalar."""
Function = Callable[[int, int], None]

_alive: list[Any] = []
"""Owners of machine code."""
_on_compilation: list[Callable[[], None]] = [lambda: None]


class Kernel:
    """The function `name` of (control, ...) in a module, which Numba compiles."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.functions: dict[Kinds, Function] = {}

    def function(self, kinds: Kinds, arguments: tuple[Any, ...]) -> Function:
        """Return the machine code for arguments of these types: loaded, or else compiled.

        If it cannot be kept (a full disk), there is a `RuntimeWarning`.
        """
        if kinds not in self.functions:
            types = zlib.crc32(repr(kinds).encode())
            file = f"{self.name}-{types:08x}-{digest(self.module):08x}"
            self.functions[kinds] = _load(file) or self._compile(file, arguments)
        return self.functions[kinds]

    def _compile(self, file: str, arguments: tuple[Any, ...]) -> Function:
        import numba

        if getattr(numba.config, "DISABLE_JIT", 0):  # functions imported now would stay Python
            raise UserError(
                "NUMBA_DISABLE_JIT is set, and kernels must be compiled: unset it, or compute with "
                "torch (backend='torch', --backend torch)"
            )
        _on_compilation[-1]()
        from tiedgpt.infer.kernels import compilation

        module = import_module(self.module)
        callback = compilation.compile_kernel(getattr(module, self.name), arguments)
        _alive.append(callback)
        try:
            _keep(file, *compilation.machine_code(callback, SYMBOL))
        except (OSError, TiedGPTError) as error:
            warnings.warn(
                f"kernels were compiled for this process alone: they could not be kept: {error} "
                "(free room there, or set NUMBA_CACHE_DIR)",
                RuntimeWarning,
                stacklevel=1,
            )
        return FUNCTION(callback.address)


class Record:
    """Arguments of many steps, flattened once; the arrays must stay where they are in memory."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.words, self.kinds = arguments, list[int](), list[Any]()
        _flatten(arguments, self.words, self.kinds)


class Step:
    """A step of a kernel: each thread calls it with its number and returns when all is done.

    A thread that comes when the step is over returns at once.
    """

    def __init__(
        self, kernel: Kernel, phases: int, threads: int, arguments: tuple[Any, ...]
    ) -> None:
        lines = 1 + phases * (1 + threads)
        self.counters, self.arguments = np.zeros(lines * LINE, np.int64), arguments
        words, kinds = list[int](), list[Any]()
        _flatten((self.counters, threads, *arguments), words, kinds)
        self.function = kernel.function(tuple(kinds), arguments)
        self._record = array("q", words)
        self.address = self._record.buffer_info()[0]

    def __call__(self, me: int) -> None:
        """Take part as thread `me`; the GIL is released."""
        self.function(self.address, me)


@contextmanager
def on_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` once if kernels begin to be compiled inside the block."""
    _on_compilation.append(cache(callback))
    try:
        yield
    finally:
        _on_compilation.pop()


def _flatten(values: tuple[Any, ...], words: list[int], kinds: list[Any]) -> None:
    """Append a record's words, as `compilation.py` reads them, and the arguments' types.

    The words of an array are its address and its shape.
    """
    for value in values:
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise ValueError(
                    f"kernels take contiguous arrays only, got strides {value.strides}"
                )
            words.append(value.ctypes.data)
            words += value.shape
            kinds += (value.dtype, value.ndim)
        elif isinstance(value, Record):
            words += value.words
            kinds += value.kinds
        elif isinstance(value, tuple):
            _flatten(value, words, kinds)
        else:
            words.append(int(value.view(np.int32) if isinstance(value, np.float32) else value))
            kinds.append(type(value))


def cache_directories() -> list[Path]:
    """Return the directories of the cache. Files are written to the first writable one."""
    if directory := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(directory)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(__file__).parent / "__pycache__", Path(home) / "tiedgpt"]


def _load(file: str) -> Function | None:
    """Return the function of the first undamaged file that can be loaded, or None."""
    for path in (path for folder in cache_directories() for path in folder.glob(f"{file}-*")):
        with suppress(OSError, RuntimeError, ValueError, AttributeError):
            data = path.read_bytes()
            if zlib.crc32(data) != int(path.stem[-8:], 16):
                continue
            if path.suffix == ".so":
                return FUNCTION((SYMBOL, ctypes.CDLL(str(path.resolve()))))
            return FUNCTION(_address_in(data))
    return None


def _address_in(data: bytes) -> int:
    """Return the address of the function in an object file, once LLVM has loaded it."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    jit = llvm.create_lljit_compiler(machine, suppress_errors=True)
    library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
    loaded = library.export_symbol(SYMBOL).link(jit, SYMBOL)
    _alive.append((jit, loaded))
    return int(loaded[SYMBOL])


def _keep(file: str, data: bytes, suffix: str) -> None:
    """Write machine code to the first place that can be written, or raise the last error."""
    for folder in (places := cache_directories()):
        try:
            with replacing(folder / f"{file}-{zlib.crc32(data):08x}{suffix}") as temporary:
                temporary.write_bytes(data)
            return
        except (OSError, TiedGPTError):
            if folder is places[-1]:
                raise


@cache
def digest(module: str) -> int:
    """Return a digest of everything that machine code depends on except the arguments' types."""
    origins = {__file__, getattr(find_spec(module), "origin", None) or __file__}
    folders = sorted({Path(origin).parent for origin in origins})
    sources = [file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py"))]
    numba = [(name, os.stat(spec.origin).st_mtime_ns) for name in ("numba", "llvmlite")
             if (spec := find_spec(name)) and spec.origin]  # fmt: skip
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    about = (sys.platform, _cpu(), numba, sorted(settings.items()))
    return zlib.crc32(b"".join(sources) + repr(about).encode())


def _cpu() -> str:
    """Return the CPU's name and features as the system, or else LLVM, describes them."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first, _, _ = file.read(1 << 14).partition("\n\n")
        return "\n".join(line for line in first.split("\n") if line.startswith(CPU_LINES))
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
