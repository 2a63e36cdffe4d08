"""Kernels are compiled once, kept as machine code, and loaded without Numba."""

import errno
import os
import subprocess
import sys
import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest

from tiedgpt.errors import UserError
from tiedgpt.infer.kernels import code_files
from tiedgpt.infer.kernels.compile_cache import Kernel, Step, on_compilation

SOURCE = '''
from numba import njit

@njit(error_model="numpy")
def weigh(control, line, array, is_less):
    """Multiply a row for each thread; a thread's result is at its number."""
    for k in range(array.shape[1]):
        x = array[control.me, k] * line.slope + line.start
        array[control.me, k] = -x if is_less else x
'''


class Line(NamedTuple):
    slope: Any
    start: Any


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache))
    return cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the kernel's module."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "weigh_kernel.py").write_text(SOURCE)
    return folder


@pytest.fixture
def kernel(monkeypatch, cache, folder):
    """A function that returns a kernel of a process that has not used it."""
    monkeypatch.syspath_prepend(folder)
    return lambda: Kernel("weigh_kernel", "weigh")


@pytest.fixture
def no_process(monkeypatch):
    """Kernels are compiled by this process, which has imported Numba already."""
    monkeypatch.setattr(sys, "executable", "")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, folder):
    """The file of the kernel's machine code; no test loads it from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        Step(Kernel("weigh_kernel", "weigh"), 1, 2, arguments())
        (file,) = code_files.cache_directories()[0].iterdir()
    return file


def arguments(dtype=np.float64):
    return Line(np.float32(1.5), 2), np.arange(6, dtype=dtype).reshape(2, 3), True


def weigh(kernel, dtype=np.float64):
    """Run the kernel as thread 1, then as thread 0; return its output."""
    its = arguments(dtype)
    step = Step(kernel, 1, 2, its)
    step(1)
    step(0)
    return its[1].tolist()


EXPECTED = [[-2, -3.5, -5], [-6.5, -8, -9.5]]


@pytest.mark.parametrize("has_linker", [True, False])
def test_machine_code_is_cached_and_loaded_with_and_without_a_linker(
    kernel, monkeypatch, cache, no_process, has_linker
):
    if not has_linker:
        monkeypatch.setenv("PATH", str(cache))
    with on_compilation(lambda: calls.append("now")):
        calls = []
        assert weigh(kernel()) == EXPECTED
    assert calls == ["now"]
    (file,) = cache.iterdir()
    assert file.suffix == (".so" if has_linker else ".o")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # compiling would raise
    assert weigh(kernel()) == EXPECTED


def test_kernels_are_compiled_beside_each_other_by_processes_of_their_own(
    kernel, cache, monkeypatch
):
    first, second, calls = kernel(), kernel(), []
    with on_compilation(lambda: calls.append("now")):
        first.prepare(*arguments())
        second.prepare(*arguments(np.float32))
        assert weigh(first) == weigh(second, np.float32) == EXPECTED
    assert calls == ["now"]
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # compiling would raise
    assert weigh(kernel()) == weigh(kernel(), np.float32) == EXPECTED


def test_where_no_process_can_be_started_this_one_compiles(kernel, cache, monkeypatch):
    for executable in ("", "false"):
        monkeypatch.setattr(sys, "executable", executable)
        assert weigh(kernel()) == EXPECTED
        (file,) = cache.iterdir()
        file.unlink()


def test_a_damaged_file_is_compiled_again(kernel, cache, compiled, no_process, monkeypatch):
    data, damaged_file = compiled.read_bytes(), cache / compiled.name
    for damaged in (data[:100], b"", data[:-1] + b"?"):
        damaged_file.write_bytes(damaged)
        with monkeypatch.context() as patch, pytest.raises(UserError, match="must be compiled"):
            patch.setenv("NUMBA_DISABLE_JIT", "1")
            weigh(kernel())
    assert weigh(kernel()) == EXPECTED
    assert damaged_file.read_bytes() == data or len(list(cache.iterdir())) == 2


def test_unloadable_files_are_skipped(kernel, cache, compiled, monkeypatch):
    data = b"no machine code"
    for suffix in (".so", ".o"):
        name = compiled.name[: -len(f"{0:08x}{compiled.suffix}")]
        (cache / f"{name}{zlib.crc32(data):08x}{suffix}").write_bytes(data)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="must be compiled"):
        patch.setenv("NUMBA_DISABLE_JIT", "1")
        weigh(kernel())
    (cache / compiled.name).write_bytes(compiled.read_bytes())
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert weigh(kernel()) == EXPECTED


@pytest.mark.parametrize(
    "change", [None, "another CPU", "a longer name", "a setting of Numba", "the source"]
)
def test_the_wheel_s_machine_code_is_loaded_by_the_cpus_that_it_is_for(
    kernel, compiled, monkeypatch, tmp_path, change
):
    name, types, _, checksum = compiled.stem.split("-")
    target = {"another CPU": "avx2", "a longer name": "zx81-bf16"}.get(change, "zx81")
    digest = code_files.source_digest("weigh_kernel") + (change == "the source")
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    file = wheel / f"{name}-{types}-{digest:08x}-{target}-{checksum}{compiled.suffix}"
    file.write_bytes(compiled.read_bytes())
    monkeypatch.setattr(code_files, "IN_WHEEL", wheel)
    monkeypatch.setattr(code_files, "this_target", lambda: "zx81")
    if change == "a setting of Numba":
        monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # compiling raises
    if change:
        with pytest.raises(UserError, match="kernels must be compiled"):
            weigh(kernel())
    else:
        assert weigh(kernel()) == EXPECTED


def test_uncacheable_kernels_are_compiled_for_the_process_with_a_warning(
    kernel, no_process, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="for this process alone.*NUMBA_CACHE_DIR"):
        assert weigh(kernel()) == EXPECTED


def test_the_cache_file_is_named_after_the_dependencies_of_machine_code(monkeypatch):
    digests = set()
    for name, value in [("NUMBA_CPU_NAME", ""), ("NUMBA_CPU_NAME", "generic"), ("X", "y")]:
        monkeypatch.setenv(name, value)
        digests.add(code_files.digest.__wrapped__("tiedgpt.infer.kernels.forward"))
    assert len(digests) == 2


def test_a_change_beside_a_kernel_changes_the_name_of_its_cache_file(tmp_path, monkeypatch):
    package, digests = tmp_path / "kernels_elsewhere", set()
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernel.py").write_text("from kernels_elsewhere.helper import write\n")
    monkeypatch.syspath_prepend(tmp_path)
    for helper in ("write = abs", "write = round", "write = round"):
        (package / "helper.py").write_text(helper)
        digests.add(code_files.source_digest.__wrapped__("kernels_elsewhere.kernel"))
    assert len(digests) == 2


def test_arrays_with_gaps_and_numba_disabled_are_refused(kernel, monkeypatch):
    with pytest.raises(ValueError, match="contiguous"):
        Step(kernel(), 1, 1, (np.zeros((4, 4))[:, ::2],))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(UserError, match="NUMBA_DISABLE_JIT is set"):
        weigh(kernel())


def test_kernels_are_compiled_without_numba_in_this_process_into_the_working_directory(
    tmp_path, folder, request
):
    program = """
import os, sys, numpy as np
from tiedgpt.infer.kernels.sampling import score_targets
from tiedgpt.infer.kernels.thread_pool import ThreadPool
print(score_targets(ThreadPool(1), np.eye(3, dtype=np.float32), [0, 1, 0])[1])
os.environ["NUMBA_CACHE_DIR"] = "."
sys.path += sys.argv[1:]
from tests.infer.kernels.test_compile_cache import EXPECTED, Kernel, weigh
for disabled in "01":  # the second loads what the first has compiled
    os.environ["NUMBA_DISABLE_JIT"] = disabled
    assert weigh(Kernel("weigh_kernel", "weigh")) == EXPECTED
print("numba" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(folder), str(request.config.rootpath)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout == "[1, 1, 2]\nFalse\n", ran.stderr
    assert len(list(tmp_path.iterdir())) == 1
