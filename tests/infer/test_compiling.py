"""Kernels are compiled once, wherever they can be kept, and who waits for them is told."""

import sys

from numba import njit
from numba.core.dispatcher import Dispatcher

from tiedgpt.cli.generate import _telling_of_compilation
from tiedgpt.infer.compiling import telling_of_compilation, where_kept
from tiedgpt.infer.kernels import forward
from tiedgpt.infer.kernels.compile_cache import Kernel


def test_compilation_is_told_of_when_it_happens_and_only_then():
    told = []
    plus = njit(lambda x: x + 1)
    with telling_of_compilation(lambda: told.append("now")):
        assert plus(1) == 2 and plus(1.5) == 2.5
    assert told == ["now"]
    with telling_of_compilation(lambda: told.append("again")):
        plus(2)
    assert told == ["now"]


def test_without_numbas_events_kernels_are_compiled_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba.core.event", None)
    told = []
    minus = njit(lambda x: x - 1)
    with telling_of_compilation(lambda: told.append("now")):
        assert minus(1) == 0
    assert told == []


def test_kernels_that_can_be_kept_nowhere_are_compiled_all_the_same(monkeypatch, capsys):
    def nowhere(self):
        raise RuntimeError("cannot cache function: no locator available")

    class OnKernels:
        backend = "kernels"

    assert where_kept()
    monkeypatch.setattr(Dispatcher, "enable_caching", nowhere)
    monkeypatch.setattr(forward, "forward", Kernel(lambda control: None))
    assert where_kept() is None
    with _telling_of_compilation(OnKernels()):
        assert njit(lambda x: 2 * x)(2) == 4
    assert "set NUMBA_CACHE_DIR to have them kept" in capsys.readouterr().err
