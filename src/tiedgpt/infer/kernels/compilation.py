"""A kernel's function -> machine code that needs neither Numba nor Python.

Kernels allocate nothing and raise nothing, so that they need no more than the C library. Numba
still compiles code that handles errors; its calls of Numba and Python are replaced by traps.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from tiedgpt.errors import UserError
from tiedgpt.infer.kernels.arguments import Control
from tiedgpt.infer.kernels.compile_cache import Record
from tiedgpt.infer.kernels.simd import CPU_NAME, FEATURE_LIST, f32, i32, i64

LINKER = "cc"
"""The program that links shared libraries, if it is installed."""
FOREIGN = re.compile("numba_|NRT_|_?Py")
"""Functions and variables of Numba and Python."""
ERROR_HANDLING = re.compile(
    "numba_gil_|numba_unpickle|numba_do_raise|numba_runtime_build_excinfo|NRT_Free|"
    "NRT_MemInfo_call_dtor|_?Py"
)
"""The functions among them that only handle errors or free memory."""


def compile_kernel(function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Return the C callback (record, number of the thread) of a kernel of (control, ...)."""
    counters = types.Array(types.int64, 1, "C")
    kinds = [numba.typeof(_example(argument)) for argument in arguments]
    read = _reader(types.Tuple([counters, types.int64, *kinds]))

    @cfunc(types.void(types.CPointer(types.int64), types.int64), error_model="numpy")
    def entry(record, me):
        values = read(record)
        function(Control(values[0], values[1], me), *values[2:])

    return entry


def machine_code(callback: Any, symbol: str) -> tuple[bytes, str]:
    """Return a shared library (".so") or an object file (".o") that exports a C callback.

    Raises `UserError` for a kernel that needs Numba, for example to allocate memory.
    """
    module = llvm.parse_assembly(callback.inspect_llvm())
    stubs = ["declare void @llvm.trap()"]
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "internal"
        elif FOREIGN.match(function.name):
            if not ERROR_HANDLING.match(function.name):
                raise UserError(f"the kernel calls {function.name}, which needs Numba")
            body = "{ call void @llvm.trap() unreachable }"
            stubs.append(f"define hidden void @{function.name}() {body}")
    for variable in module.global_variables:
        if variable.is_declaration and FOREIGN.match(variable.name):
            stubs.append(f"@{variable.name} = hidden global ptr null")
    module.link_in(llvm.parse_assembly("\n".join(stubs)))
    entry = module.get_function(callback.native_name)
    entry.name, entry.linkage = symbol, "external"
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=CPU_NAME, features=FEATURE_LIST, opt=3, reloc="pic", codemodel="default",
    )  # fmt: skip
    data = machine.emit_object(module)
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        file.write_bytes(data)
        command = [LINKER, "-shared", "-o", str(library), str(file), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return library.read_bytes(), ".so"
    return data, ".o"


def _example(value: Any) -> Any:
    """Return a small argument of the same type, by Numba's `typeof`, as this one."""
    if isinstance(value, Record):
        value = value.arguments
    if isinstance(value, np.ndarray):
        return np.empty((0,) * value.ndim, value.dtype)
    return type(value)(*map(_example, value)) if isinstance(value, tuple) else value


def _reader(numba_type: Any) -> Any:
    """Make a function that reads a value of this type from a record of int64.

    `compile_cache._flatten` writes the record.
    """

    @intrinsic
    def read(typing, record):
        def emit(context, builder, signature, arguments):
            words = (builder.load(builder.gep(arguments[0], [i64(n)])) for n in range(1 << 16))
            return _value(context, builder, numba_type, words)

        return numba_type(record), emit

    return read


def _value(context, builder, numba_type, words):
    """Return a value of a type, made of the next words."""
    if isinstance(numba_type, types.BaseTuple):
        values = [_value(context, builder, item, words) for item in numba_type.types]
        return context.make_tuple(builder, numba_type, values)
    word = next(words)
    if not isinstance(numba_type, types.Array):
        if numba_type == types.float32:
            return builder.bitcast(builder.trunc(word, i32), f32)
        return context.cast(builder, word, types.int64, numba_type)
    element = context.get_data_type(numba_type.dtype)
    size = step = i64(context.get_abi_sizeof(element))
    shape, strides = [next(words) for _ in range(numba_type.ndim)], []
    for n in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, n)
    array = cgutils.create_struct_proxy(numba_type)(context, builder)
    array.data = builder.inttoptr(word, element.as_pointer())
    array.shape = cgutils.pack_array(builder, shape)
    array.strides = cgutils.pack_array(builder, strides)
    array.itemsize, array.nitems = size, builder.sdiv(step, size)
    return array._getvalue()
