"""The classes of CPUs for which a wheel for Linux on x86-64 or aarch64 carries machine code."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import NamedTuple

ZEN = "AuthenticAMD"
"""The vendor of AMD's CPUs, whose kernels prefetch less."""
LEVEL_3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
LEVEL_4 = LEVEL_3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""The features of LLVM's x86-64-v3 and x86-64-v4, by their names in Linux."""
LLVM_3, LLVM_4 = "+avx2,+fma", "+avx2,+fma,+avx512f,+avx512vl,+avx512vnni"
"""The features by which kernels choose instructions, by their names in LLVM."""
ARM_8_2 = {"asimd", "asimddp", "asimdhp", "fphp", "asimdrdm", "atomics", "lrcpc", "crc32"}
"""The features of LLVM's neoverse-n1 that code may use, by their names in Linux."""


class Target(NamedTuple):
    """A class of CPUs."""

    cpu: str
    """One of its CPUs for LLVM."""
    features: str
    """NUMBA_CPU_FEATURES; `simd.py` chooses instructions by them."""
    flags: set[str]
    """The vendor and flags (ARM: features) of /proc/cpuinfo that its CPUs have."""
    others: set[str]
    """The vendor and flags that its CPUs lack: with one, a CPU is of a better class or of none."""


X86_64 = {
    "avx2": Target("x86-64-v3", LLVM_3, LEVEL_3, {ZEN, "avx_vnni", "avx512f"}),
    "avx2-zen": Target("znver1", LLVM_3, LEVEL_3 | {ZEN}, {"avx_vnni", "avx512f"}),
    "avx-vnni": Target("x86-64-v3", f"{LLVM_3},+avxvnni", LEVEL_3 | {"avx_vnni"}, {ZEN, "avx512f"}),
    "avx512-vnni": Target("x86-64-v4", LLVM_4, LEVEL_4 | {"avx512_vnni"}, {ZEN, "avx512_bf16"}),
    "avx512-bf16": Target(
        "x86-64-v4", f"{LLVM_4},+avx512bf16", LEVEL_4 | {"avx512_vnni", "avx512_bf16"}, {ZEN}
    ),
    "avx512-bf16-zen": Target(
        "znver4", f"{LLVM_4},+avx512bf16", LEVEL_4 | {"avx512_vnni", "avx512_bf16", ZEN}, set()
    ),
}
AARCH64 = {
    "neon": Target("generic", "+neon", {"asimd"}, {"asimddp", "i8mm", "bf16"}),
    "dotprod": Target("neoverse-n1", "+neon,+dotprod", ARM_8_2, {"i8mm", "bf16"}),
    "i8mm-bf16": Target(
        "neoverse-n1", "+neon,+dotprod,+i8mm,+bf16", ARM_8_2 | {"i8mm", "bf16"}, set()
    ),
}
TARGETS = {"x86_64": X86_64, "aarch64": AARCH64}
"""The classes by the name of the machine in Linux (`uname -m`)."""


@cache
def this_target() -> str | None:
    """Return the name of this CPU's class, or None."""
    return find_target(read_cpu())


def find_target(about: str) -> str | None:
    """Return the name of a CPU's class by its part of /proc/cpuinfo, or None."""
    lines = (line.partition(":") for line in about.split("\n"))
    fields = {name.strip(): value for name, _, value in lines}
    flags = {
        flag for name in ("vendor_id", "flags", "Features") for flag in fields.get(name, "").split()
    }
    for name, target in (X86_64 | AARCH64).items():
        if target.flags <= flags and not target.others & flags:
            return name
    return None


def read_cpu() -> str:
    """Return what Linux says of the first CPU; elsewhere, nothing."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return file.read(1 << 14).partition("\n\n")[0]
    return ""
