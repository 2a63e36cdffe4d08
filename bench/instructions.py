"""Instructions of the kernels' inner loop by class of CPU, and cycles as llvm-mca estimates them.

    python bench/instructions.py

The loop multiplies a step of 64 rows of weights (4 int8 or 8 four-bit numbers of each) with some
vectors. Instructions and cycles are counted for 64 products. llvm-mca (LLVM's package) simulates a
core that finds all data in its first cache: an estimate. Nothing is run, so any machine will do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"
CPUS = {
    "x86-64 (plain)": (X86, "x86-64", "+sse2"),
    "Skylake (avx2)": (X86, "skylake", "+avx2,+fma"),
    "Zen 2 (avx2)": (X86, "znver2", "+avx2,+fma"),
    "Alder Lake (avx-vnni)": (X86, "alderlake", "+avx2,+fma,+avxvnni"),
    "Ice Lake (avx512-vnni)": (X86, "icelake-server", "+avx2,+avx512f,+avx512vl,+avx512vnni"),
    "Cortex-A72 (plain)": (ARM, "cortex-a72", "+neon"),
    "Neoverse N1 (arm-dotprod)": (ARM, "neoverse-n1", "+neon,+dotprod"),
    "Neoverse V1 (arm-i8mm)": (ARM, "neoverse-v1", "+neon,+dotprod,+i8mm"),
    "Apple M1 (arm-dotprod)": (ARM, "apple-m1", "+neon,+dotprod"),
}
"""The triple, the CPU and the features of each row."""
PRODUCTS = {"int8": 64 * 4, "int4": 64 * 8}
"""Products of a vector with one step of a panel."""
COLUMNS = [(precision, n) for precision in PRODUCTS for n in (1, 6)]


def assembly(precision: str, n: int, parts: range, cpu: tuple[str, str, str]) -> str:
    """Return the assembly of a microkernel that multiplies some parts of a panel."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from tiedgpt.infer.kernels.arguments import Matrix, Vectors
    from tiedgpt.infer.kernels.microkernels import PRECISIONS
    from tiedgpt.infer.kernels.simd import f32, i8, i16, i32, i64, store

    triple, name, features = cpu
    module = ir.Module()
    module.triple = triple
    scales = i16 if precision == "int4" else f32
    pointers = [item.as_pointer() for item in (i8, scales, i8, f32, i32, f32)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, i64]), "kernel")
    *arrays, out, width = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    matrix, x = Matrix(*arrays[:2], None), Vectors(*arrays[2:])
    rows = PRECISIONS[precision](builder, matrix, x, width, n, parts)
    for number, values in enumerate(value for row in rows for value in row):
        store(builder, values, builder.gep(out, [i64(16 * number)]))
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=name, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_unrolling = False
    passes: Any = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def inner_loop(text: str) -> list[str]:
    """Return the instructions of the innermost loop."""
    loops = []
    for match in re.finditer(r"^(\.LBB\w+):", text, re.MULTILINE):
        body = text[match.end() :].splitlines()
        ends = [at for at, line in enumerate(body) if re.search(rf"\b{match[1][1:]}\b", line)]
        if ends:
            lines = [line.strip() for line in body[: ends[0] + 1]]
            loops.append([line for line in lines if line and not line.startswith((".", "#", "/"))])
    return min(loops, key=len)


def cycles(loop: list[str], cpu: tuple[str, str, str]) -> float:
    """Return the cycles of one pass of a loop."""
    triple, name, _ = cpu
    command = ["llvm-mca", f"-mtriple={triple}", f"-mcpu={name}", "-iterations=100"]
    ran = subprocess.run(command, input="\n".join(loop), capture_output=True, text=True, check=True)
    return int(re.search(r"Total Cycles:\s+(\d+)", ran.stdout)[1]) / 100


def print_row(name: str) -> None:
    """Print the instructions and the cycles of a CPU; this process compiles for it."""
    from tiedgpt.infer.kernels.microkernels import split_panel

    cells = []
    for precision, n in COLUMNS:
        loops = [inner_loop(assembly(precision, n, parts, CPUS[name])) for parts in split_panel(n)]
        shares = PRODUCTS[precision] * n / 64
        count, total = sum(map(len, loops)), sum(cycles(loop, CPUS[name]) for loop in loops)
        cells.append(f"{count / shares:.1f} / {total / shares:.1f}")
    print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print_row(sys.argv[1])
        raise SystemExit
    print(
        "| CPU (class) |" + "".join(f" {precision}, {n} |" for precision, n in COLUMNS), flush=True
    )
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)
    for name, (_, cpu, features) in CPUS.items():
        masks = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        ran = subprocess.run(
            [sys.executable, __file__, name], env=os.environ | masks, capture_output=True, text=True
        )
        print(ran.stdout.strip() or f"{name}: {ran.stderr}", flush=True)
