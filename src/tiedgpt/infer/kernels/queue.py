"""Work shared by threads without locks: phases of chunks, taken one by one.

A step is a row of phases. In each, threads take chunks until none is left, and go on when all are
done. No thread is waited for that has not taken a chunk: one that comes late, or is put to sleep by
the system, finds fewer chunks to take. A chunk computes the same whoever takes it.
"""

from __future__ import annotations

import os
import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tiedgpt.infer.kernels.simd import call, i32, pointer

NEXT, DONE, LINE = 0, 8, 16
"""Where a phase counts chunks taken and chunks done: cache lines apart, in int64."""
SPINS = 4000
"""Looks at a counter before the thread offers its core to others."""
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")


@intrinsic
def add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an element of an int64 array at once for all threads; return what was there before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = pointer(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", address, arguments[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), emit


@intrinsic
def read(typing: Any, array: Any, index: Any) -> Any:
    """Return an element of an int64 array as other threads last wrote it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = pointer(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(address, "seq_cst", 8)

    return types.int64(array, types.intp), emit


@intrinsic
def write(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Set an element of an int64 array for all threads."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], address, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), emit


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that the thread waits in a loop."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def give_way(typing: Any) -> Any:
    """Offer the core to other threads."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "SwitchToThread" if os.name == "nt" else "sched_yield", i32, [])
        return context.get_dummy_value()

    return types.void(), emit


@njit(inline="always", error_model="numpy")
def take(control, phase, chunks):
    """Return the next chunk of a phase that no thread has taken, or -1."""
    if chunks == 1 and read(control, phase * LINE + NEXT) > 0:
        return -1
    chunk = add(control, phase * LINE + NEXT, 1)
    return chunk if chunk < chunks else -1


@njit(inline="always", error_model="numpy")
def finish(control, phase, mine, chunks):
    """Count the chunks that this thread did, wait until all are done; return the next phase."""
    if mine:
        add(control, phase * LINE + DONE, mine)
    spins = 0
    while read(control, phase * LINE + DONE) < chunks:
        pause()
        spins += 1
        if spins > SPINS:
            give_way()
    return phase + 1
