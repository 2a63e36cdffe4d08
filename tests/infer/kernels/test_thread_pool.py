"""Threads that share a step: late, missing and failing ones, and steps that were cut short."""

import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from tests.infer.kernels.conftest import made
from tiedgpt.errors import NoRoomError
from tiedgpt.infer.kernels.compile_cache import Step
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.weights.formats.packed.writer import pack_gpt

IDS = list(range(20))


@pytest.fixture(scope="module")
def runner():
    return PackedRunner(pack_gpt(made(), "fp32"), threads=3)


@pytest.fixture(scope="module")
def expected(runner):
    return runner.session(n_slots=1, capacity=24).read([0], [IDS], all_logits=[0])[0]


def steps(runner):
    session = runner.session(n_slots=1, capacity=24)
    return np.concatenate([session.read([0], [[token]])[0].copy() for token in IDS])


def test_a_late_helper_thread_changes_nothing(runner, expected, monkeypatch):
    done = []

    def noted(step, me):
        compiled(step, me)
        done.append((step, me))

    compiled = Step.__call__
    session = runner.session(n_slots=1, capacity=24)
    session.read([0], [IDS[:1]])
    monkeypatch.setattr(Step, "__call__", noted)
    for at, token in enumerate(IDS[1:], 1):
        got = session.read([0], [[token]])[0]
        np.testing.assert_array_equal(got, expected[at : at + 1])
        compiled(*done[0])


@contextmanager
def failing(monkeypatch, error, computes=False):
    """Raise in the main thread's part of each step, before or after it is computed."""
    compiled, main = Step.__call__, threading.current_thread()

    def call(*work):
        if computes or threading.current_thread() is not main:  # a late helper of another session
            compiled(*work)
        if threading.current_thread() is main:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", call)
        yield


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (MemoryError, NoRoomError),
        (RuntimeError, RuntimeError),
    ],
)
def test_a_failing_read_is_discarded_and_the_session_continues(
    runner, expected, monkeypatch, error, raised, computes
):
    session = runner.session(n_slots=1, capacity=24)
    session.read([0], [IDS[:4]])
    with failing(monkeypatch, error("no more"), computes), pytest.raises(raised, match="no m"):
        session.read([0], [IDS[4:12]])
    assert session.lengths == [4]
    got = session.read([0], [IDS[4:]], all_logits=[0])[0]
    np.testing.assert_array_equal(got, expected[4:])


def test_an_interrupted_step_does_not_write_to_a_slot_copied_later(expected, monkeypatch):
    session = PackedRunner(pack_gpt(made(), "fp32"), threads=1).session(n_slots=2, capacity=24)
    session.read([0], [IDS[:10]])
    session.read([1], [[90]])
    with failing(monkeypatch, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        session.read([1], [[91, 92, 93]])
    session.copy(0, 1)
    got = session.read([1], [IDS[10:]], all_logits=[1])[0]
    np.testing.assert_array_equal(got, expected[10:])


def test_a_helper_that_fails_serves_the_next_step(runner, expected, monkeypatch):
    compiled, main = Step.__call__, threading.current_thread()
    failed, served = threading.Event(), threading.Event()
    names = set()

    def call(step, me):
        if getattr(step.arguments[2], "arguments", None) is not session.cache:
            return compiled(step, me)  # a late helper of another session's
        if threading.current_thread() is main:
            waited = failed if not failed.is_set() else served
            assert waited.wait(20)
        elif not failed.is_set():
            names.add(threading.current_thread().name)
            if len(names) == 2:
                failed.set()
            raise MemoryError("Allocation failed (probably too large).")
        elif threading.current_thread().name in names:
            served.set()
        return compiled(step, me)

    session = runner.session(n_slots=1, capacity=24)
    monkeypatch.setattr(Step, "__call__", call)
    for at, token in enumerate(IDS):
        got = session.read([0], [[token]])[0]
        np.testing.assert_array_equal(got, expected[at : at + 1])
    assert served.is_set()


def test_the_caller_computes_alone_where_no_thread_starts(runner, expected, monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    np.testing.assert_array_equal(steps(runner), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_continues_with_its_own_helpers(runner, expected, monkeypatch):
    session = runner.session(n_slots=1, capacity=24)
    session.read([0], [IDS[:4]])
    child = os.fork()
    if not child:
        code = 1
        try:
            got = session.read([0], [IDS[4:]], all_logits=[0])[0]
            helpers = threading.active_count() - 1
            code = 0 if np.array_equal(got, expected[4:]) and helpers == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    got = session.read([0], [IDS[4:]], all_logits=[0])[0]
    np.testing.assert_array_equal(got, expected[4:])


def test_sessions_of_one_runner_run_in_separate_threads(runner, expected):
    got = {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: steps(runner)})) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in (got[0], got[1], got[2]):
        np.testing.assert_array_equal(logits, expected)


def test_missing_helpers_are_not_waited_for(expected, monkeypatch):
    monkeypatch.setattr(threading.Thread, "run", lambda thread: None)
    alone = PackedRunner(pack_gpt(made(), "fp32"), threads=3)
    session = alone.session(n_slots=1, capacity=24)
    for at, token in enumerate(IDS):
        got = session.read([0], [[token]])[0]
        np.testing.assert_array_equal(got, expected[at : at + 1])


def test_helpers_end_with_their_session(runner):
    before = set(threading.enumerate())
    session = runner.session(n_slots=1, capacity=8)
    session.read([0], [[1]])
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del session
    for helper in helpers:
        helper.join(timeout=20)
    assert not any(helper.is_alive() for helper in helpers)
