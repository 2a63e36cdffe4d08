"""Work shared by threads without locks: phases of chunks, claimed one by one.

A step is a row of phases. In each, threads claim chunks until none is left, and go on when all are
done. A thread begins with its own share of the chunks, which lie side by side and are the same in
each step, and then steals from the shares of others. Threads wait only for those that have claimed
a chunk: one that comes late, or that the system interrupts, finds fewer chunks left. The result of
a chunk does not depend on the thread.
"""

from __future__ import annotations

import os
import platform

from llvmlite import ir
from numba import types

from tiedgpt.infer.kernels.arguments import LINE
from tiedgpt.infer.kernels.simd import ARRAY, call, i32, instructions, jit

SPINS = 4000
"""Times that a thread looks at a counter before it yields its core."""
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")


@instructions(types.int64, ARRAY, types.intp, types.int64)
def add(builder, array, index, value):
    """Add to an element of an int64 array atomically; return its value before."""
    return builder.atomic_rmw("add", builder.gep(array, [index]), value, "seq_cst")


@instructions(types.int64, ARRAY, types.intp)
def read(builder, array, index):
    """Return an element of an int64 array as other threads last wrote it."""
    return builder.load_atomic(builder.gep(array, [index]), "seq_cst", 8)


@instructions(types.void, ARRAY, types.intp, types.int64)
def write(builder, array, index, value):
    """Set an element of an int64 array for all threads."""
    builder.store_atomic(value, builder.gep(array, [index]), "seq_cst", 8)


@instructions(types.void)
def pause(builder):
    """Tell the core that the thread waits in a loop (x86: `pause`)."""
    if X86:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@instructions(types.void)
def yield_core(builder):
    """Let other threads run on this core."""
    call(builder, "SwitchToThread" if os.name == "nt" else "sched_yield", i32, [])


@jit(inline="always")
def is_over(control):
    """Return whether all phases are done."""
    return read(control.counters, 0) != 0


@jit(inline="always")
def end(control):
    """Mark all phases as done."""
    write(control.counters, 0, 1)


@jit(inline="always")
def _line(control, phase):
    """Return where the counters of a phase begin."""
    return (1 + phase * (1 + control.threads)) * LINE


@jit
def next_chunk(control, phase, chunks):
    """Claim a chunk of a phase, first of this thread's own share; -1 if none is left."""
    counters, threads = control.counters, control.threads
    for further in range(threads):
        share = (control.me + further) % threads
        first, last = chunks * share // threads, chunks * (share + 1) // threads
        counter = _line(control, phase) + (1 + share) * LINE
        if first + read(counters, counter) < last:
            chunk = first + add(counters, counter, 1)
            if chunk < last:
                return chunk
    return -1


@jit(inline="always")
def barrier(control, phase, done, chunks):
    """Count the chunks that this thread did, and wait until all are done."""
    counter = _line(control, phase)
    if done:
        add(control.counters, counter, done)
    spins = 0
    while read(control.counters, counter) < chunks:
        pause()
        spins += 1
        if spins > SPINS:
            yield_core()


@jit
def claim_chunks(control, phase, chunks):
    """Yield the chunks of a phase that this thread claims; then wait until all are done."""
    done = 0
    while True:
        chunk = next_chunk(control, phase, chunks)
        if chunk < 0:
            break
        yield chunk
        done += 1
    barrier(control, phase, done, chunks)
