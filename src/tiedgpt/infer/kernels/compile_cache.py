"""Kernels that Numba compiles once; later processes load their machine code, without Numba.

A kernel's file is named by a digest of all that it depends on: the sources here and beside the
kernel, the types of the arguments, the CPU, and the Numba that is installed. It is compiled by a
process of its own, so that several kernels are compiled at once, beside other work.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.infer.kernels import code_files
from tiedgpt.infer.kernels.arguments import LINE, Record, example
from tiedgpt.infer.kernels.code_files import Function

Kinds = tuple[Any, ...]
"""Types of arguments: the dtype and the number of dimensions of an array, the class of a scalar."""
COMPILER = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from tiedgpt.infer.kernels.compilation import main
main()
"""

_on_compilation: list[Callable[[], None]] = [lambda: None]


class Kernel:
    """The function `name` of (control, ...) in a module, which Numba compiles."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.functions: dict[Kinds, Function] = {}
        self._compilers: dict[Kinds, subprocess.Popen[bytes]] = {}
        self._lock = Lock()

    def function(self, arguments: Record) -> Function:
        """Return the machine code for arguments of these types: loaded, or else compiled.

        If it cannot be kept (a full disk), there is a `RuntimeWarning`.
        """
        kinds = tuple(arguments.kinds)
        if kinds not in self.functions:
            with self._lock:
                self._start(arguments)
                if kinds not in self.functions:
                    self.functions[kinds] = self._finish(arguments)
        return self.functions[kinds]

    def prepare(self, *arguments: Any) -> None:
        """Load the machine code for a step's arguments like these, or start to compile it."""
        with self._lock:
            self._start(Record((np.zeros(LINE, np.int64), 1, *arguments)))

    def _start(self, arguments: Record) -> None:
        """Load the machine code, or start a process that compiles it."""
        kinds = tuple(arguments.kinds)
        if kinds in self.functions or kinds in self._compilers:
            return
        if function := code_files.load(self.module, self.file(kinds)):
            self.functions[kinds] = function
            return
        if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
            raise UserError(
                "NUMBA_DISABLE_JIT is set, and kernels must be compiled: unset it, or compute with "
                "torch (backend='torch', --backend torch)"
            )
        _on_compilation[-1]()
        with suppress(OSError):
            self._compilers[kinds] = start_compiler(self.module, self.name, example(arguments))

    def _finish(self, arguments: Record) -> Function:
        """Return the compiled function, by its own process or else by this one; keep its code."""
        kinds = tuple(arguments.kinds)
        process = self._compilers.pop(kinds, None)
        data = process.communicate()[0] if process else b""
        if process is None or process.returncode:
            from tiedgpt.infer.kernels import compilation

            data = compilation.compile_kernel(self.module, self.name, example(arguments))
        try:
            code_files.keep(self.module, self.file(kinds), data)
        except (OSError, TiedGPTError) as error:
            warnings.warn(
                f"kernels were compiled for this process alone: they could not be kept: {error} "
                "(free room there, or set NUMBA_CACHE_DIR)",
                RuntimeWarning,
                stacklevel=1,
            )
        return code_files.load(self.module, self.file(kinds)) or code_files.load_object(data)

    def file(self, kinds: Kinds) -> str:
        """Return the beginning of the name of the file of machine code for arguments like these."""
        return f"{self.name}-{zlib.crc32(repr(kinds).encode()):08x}"


def start_compiler(
    module: str, name: str, arguments: Any, **settings: str
) -> subprocess.Popen[bytes]:
    """Start a process that writes a kernel's object file to its standard output.

    It has these variables in its environment: Numba's settings for another CPU than this.
    """
    python = "" if hasattr(sys, "frozen") else sys.executable or ""  # an application, or no program
    process = subprocess.Popen(
        [python, "-P", "-c", COMPILER],
        env=os.environ | {"NUMBA_OPT": "0"} | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process has ended: its exit status says so
        process.stdin.write(pickle.dumps(sys.path) + pickle.dumps((module, name, arguments)))
        process.stdin.flush()
    return process


class Step:
    """A step of a kernel: each thread calls it with its number and returns when all is done.

    A thread that comes when the step is over returns at once.
    """

    def __init__(
        self, kernel: Kernel, phases: int, threads: int, arguments: tuple[Any, ...]
    ) -> None:
        lines = 1 + phases * (1 + threads)
        self.counters, self.arguments = np.zeros(lines * LINE, np.int64), arguments
        record = Record((self.counters, threads, *arguments))
        self.function = kernel.function(record)
        self._words = array("q", record.words)
        self.address = self._words.buffer_info()[0]

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
