"""A CPU runs the machine code in a wheel that was compiled for its class, and no other."""

import pytest

from tiedgpt.infer.kernels.cpu_targets import find_target

V3 = "fpu sse sse2 avx f16c fma movbe abm bmi1 bmi2 avx2"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
ARM = "fp asimd evtstrm aes pmull sha1 sha2 crc32"
ARM_8_2 = f"{ARM} atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
INTEL, AMD = "GenuineIntel", "AuthenticAMD"


@pytest.mark.parametrize(
    ("vendor", "flags", "target"),
    [
        pytest.param(INTEL, V3, "avx2", id="Haswell"),
        pytest.param(INTEL, f"{V3} avx_vnni", "avx-vnni", id="Alder Lake"),
        pytest.param(INTEL, V4, None, id="Skylake-X"),
        pytest.param(INTEL, f"{V4} avx512_vnni", "avx512-vnni", id="Cascade Lake"),
        pytest.param(
            INTEL, f"{V4} avx512_vnni avx512_bf16 avx_vnni", "avx512-bf16", id="Sapphire Rapids"
        ),
        pytest.param(AMD, V3, "avx2-zen", id="Zen 3"),
        pytest.param(AMD, f"{V4} avx512_vnni avx512_bf16", "avx512-bf16-zen", id="Zen 4"),
        pytest.param(AMD, f"{V4} avx512_vnni avx512_bf16 avx_vnni", "avx512-bf16-zen", id="Zen 5"),
        pytest.param(INTEL, V3.replace(" fma", ""), None, id="without FMA"),
    ],
)
def test_the_class_of_a_cpu_is_known_by_what_linux_says(vendor, flags, target):
    about = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: A: B\nflags\t\t: {flags}\n"
    assert find_target(about) == target


@pytest.mark.parametrize(
    ("features", "target"),
    [
        pytest.param(f"{ARM} cpuid", "neon", id="Cortex-A72"),
        pytest.param(ARM_8_2, "dotprod", id="Neoverse N1"),
        pytest.param(f"{ARM_8_2} jscvt fcma sha3 asimdfhm flagm frint", "dotprod", id="Apple M1"),
        pytest.param(f"{ARM_8_2} sve i8mm bf16 svei8mm svebf16", "i8mm-bf16", id="Neoverse V1"),
        pytest.param(f"{ARM_8_2} flagm2 frint i8mm bf16", "i8mm-bf16", id="Apple M2"),
        pytest.param(f"{ARM_8_2} i8mm", None, id="without bf16"),
        pytest.param(ARM_8_2.replace(" atomics", ""), None, id="without atomics"),
        pytest.param("half thumb fastmult vfp neon vfpv4 crc32", None, id="32 bits"),
    ],
)
def test_the_class_of_an_arm_cpu_is_known_by_its_features(features, target):
    about = f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\nCPU part\t: 0xd0c\n"
    assert find_target(about) == target
