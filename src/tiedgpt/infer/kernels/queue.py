"""Work shared by threads without locks: phases of chunks, taken one by one.

A step is a row of phases. In each, threads take chunks until none is left, and go on when all are
done. A thread begins with its own part of the chunks, which lie side by side and are its own in
each step, and then takes from the parts of others. No thread is waited for that has not taken a
chunk: one that comes late, or is put to sleep by the system, finds fewer chunks to take. A chunk
computes the same whoever takes it.
"""

from __future__ import annotations

import os
import platform
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tiedgpt.infer.kernels.simd import call, i32, pointer

LINE = 8
"""Counters lie as many int64 apart: a cache line."""
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


class Control(NamedTuple):
    """What the threads share a step by, as one of them sees it."""

    counters: Any
    """A line for the step, then for each phase one of chunks done, and one of each part's taken."""
    threads: Any
    me: Any
    """Which of them this one is."""


def control_for(phases: int, threads: int) -> Control:
    """Return what threads share a step of so many phases by; each step takes a new one."""
    lines = 1 + phases * (1 + threads)
    counters: NDArray[np.int64] = np.zeros(lines * LINE, np.int64)
    return Control(counters, threads, 0)


@njit(inline="always", error_model="numpy")
def is_over(control):
    """Return whether all phases are done."""
    return read(control.counters, 0) != 0


@njit(inline="always", error_model="numpy")
def end(control):
    """Say that all phases are done."""
    write(control.counters, 0, 1)


@njit(inline="always", error_model="numpy")
def _line(control, phase):
    return (1 + phase * (1 + control.threads)) * LINE


@njit(error_model="numpy")
def take(control, phase, chunks):
    """Return the next chunk of a phase that no thread has taken, or -1: of one's own part first."""
    counters, threads = control.counters, control.threads
    for further in range(threads):
        part = (control.me + further) % threads
        first, last = chunks * part // threads, chunks * (part + 1) // threads
        counter = _line(control, phase) + (1 + part) * LINE
        if first + read(counters, counter) < last:
            chunk = first + add(counters, counter, 1)
            if chunk < last:
                return chunk
    return -1


@njit(inline="always", error_model="numpy")
def finish(control, phase, mine, chunks):
    """Count the chunks that this thread did, wait until all are done; return the next phase."""
    done = _line(control, phase)
    if mine:
        add(control.counters, done, mine)
    spins = 0
    while read(control.counters, done) < chunks:
        pause()
        spins += 1
        if spins > SPINS:
            give_way()
    return phase + 1
