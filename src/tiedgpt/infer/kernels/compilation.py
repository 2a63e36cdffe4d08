"""A kernel's function -> machine code that needs neither Numba nor Python.

Kernels allocate nothing and raise nothing, so that they need no more than the C library. Numba
still compiles code that handles errors; its calls of Numba and Python are replaced by traps.

`compile_cache.py` starts a process for each kernel, in which NUMBA_OPT is 0: LLVM then optimizes
all functions together, once, instead of each in each of its callers.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import cfunc, types
from numba.extending import intrinsic

from tiedgpt.errors import UserError
from tiedgpt.infer.kernels.arguments import Control
from tiedgpt.infer.kernels.code_files import SYMBOL
from tiedgpt.infer.kernels.fields import in_memory, n_words, value_at
from tiedgpt.infer.kernels.simd import CPU_NAME, FEATURE_LIST, i64

FOREIGN = re.compile("numba_|NRT_|_?Py")
"""Functions and variables of Numba and Python."""
ERROR_HANDLING = re.compile(
    "numba_gil_|numba_unpickle|numba_do_raise|numba_runtime_build_excinfo|NRT_Free|"
    "NRT_MemInfo_call_dtor|_?Py"
)
"""The functions among them that only handle errors or free memory."""


def compile_kernel(module: str, name: str, arguments: tuple[Any, ...]) -> bytes:
    """Return an object file with the kernel `name` of a module for arguments like these.

    They begin with the step's counters and the number of its threads. The file exports a C function
    of (record, number of the thread). Functions become internal after the optimization, because
    LLVM would inline those with one caller, at the cost of registers in loops (1.15 times the time
    of a prompt). Raises `UserError` for a kernel that needs Numba, for example to allocate memory.
    """
    callback = _callback(getattr(import_module(module), name), arguments)
    code = llvm.parse_assembly(callback.inspect_llvm())
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=CPU_NAME,
        features=FEATURE_LIST,
        opt=3,
        reloc="pic",
        codemodel="default",
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()
    passes.add_refprune_pass()
    passes.run(code, builder)
    _replace_foreign(code)
    for function in code.functions:
        if not function.is_declaration:
            function.linkage = "internal"
    entry = code.get_function(callback.native_name)
    entry.name, entry.linkage = SYMBOL, "external"
    return bytes(machine.emit_object(code))


def _callback(function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Return the C callback (record, number of the thread) of a kernel of (control, ...)."""
    read = _reader([in_memory(numba.typeof(argument)) for argument in arguments])

    @cfunc(types.void(types.CPointer(types.int64), types.int64), error_model="numpy")
    def entry(record, me):
        values = read(record)
        function(Control(values[0], values[1], me), *values[2:])

    return entry


def _replace_foreign(module: Any) -> None:
    """Replace the functions and variables of Numba and Python by traps and null pointers.

    Raises `UserError` for a function that does more than to handle errors.
    """
    stubs = ["declare void @llvm.trap()"]
    for function in module.functions:
        if function.is_declaration and FOREIGN.match(function.name):
            if not ERROR_HANDLING.match(function.name):
                raise UserError(f"the kernel calls {function.name}, which needs Numba")
            body = "{ call void @llvm.trap() unreachable }"
            stubs.append(f"define hidden void @{function.name}() {body}")
    for variable in module.global_variables:
        if variable.is_declaration and FOREIGN.match(variable.name):
            stubs.append(f"@{variable.name} = hidden global ptr null")
    module.link_in(llvm.parse_assembly("\n".join(stubs)))


def _reader(numba_types: list[Any]) -> Any:
    """Make a function that reads values of these types from a record of int64.

    `arguments.flatten` writes the record.
    """

    @intrinsic
    def read(typing, record):
        def emit(context, builder, signature, arguments):
            values, offset = [], 0
            for numba_type in numba_types:
                words = builder.gep(arguments[0], [i64(offset)])
                values.append(value_at(context, builder, numba_type, words))
                offset += n_words(numba_type)
            return context.make_tuple(builder, signature.return_type, values)

        return types.Tuple(numba_types)(record), emit

    return read


def main() -> None:
    """Write the object file of the kernel that standard input describes to standard output.

    Garbage is not collected, because Numba's objects stay to the end. SciPy is not imported: Numba
    takes matmuls from it, which kernels do not call. Compiling takes 0.9 of the time.
    """
    gc.disable()
    sys.modules["scipy"] = None  # type: ignore[assignment]
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no machine code
    with output:
        output.write(compile_kernel(*pickle.load(sys.stdin.buffer)))
