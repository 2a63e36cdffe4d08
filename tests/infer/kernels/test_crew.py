"""Threads that share a step: late ones, missing ones, and steps that Ctrl-C cut short."""

import threading

import numpy as np
import pytest

from tests.infer.kernels.conftest import made
from tiedgpt.infer.kernels import crew
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.weights.packed.gpt import pack_gpt

IDS = list(range(20))


@pytest.fixture(scope="module")
def runner():
    return PackedRunner(pack_gpt(made(), "fp32"), threads=3)


@pytest.fixture(scope="module")
def expected(runner):
    return runner.session(slots=1, capacity=24).read([0], [IDS], every=True)[0].logits


def steps(runner):
    session = runner.session(slots=1, capacity=24)
    return np.concatenate([session.read([0], [[token]])[0].logits for token in IDS])


def test_a_helper_that_comes_late_to_a_step_changes_nothing(runner, expected, monkeypatch):
    done = []

    def noted(*work):
        crew_forward(*work)
        done.append(work)

    crew_forward = crew.forward
    monkeypatch.setattr(crew, "forward", noted)
    session = runner.session(slots=1, capacity=24)
    for at, token in enumerate(IDS):
        got = session.read([0], [[token]])[0].logits
        np.testing.assert_array_equal(got, expected[at : at + 1])
        crew_forward(*done[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_read_is_not_held_and_the_session_goes_on(
    runner, expected, monkeypatch, when
):
    session, forward = runner.session(slots=1, capacity=24), crew.forward
    session.read([0], [IDS[:4]])
    main = threading.current_thread()

    def interrupted(*work):
        if threading.current_thread() is not main:
            return forward(*work)
        if when == "after":
            forward(*work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(crew, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.read([0], [IDS[4:12]])
    assert session.lengths == [4]
    got = session.read([0], [IDS[4:]], every=True)[0].logits
    np.testing.assert_array_equal(got, expected[4:])


def test_sessions_of_one_runner_run_in_threads_of_their_own(runner, expected):
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


def test_helpers_that_never_come_are_not_waited_for(expected, monkeypatch):
    monkeypatch.setattr(crew, "_help", lambda queue: None)
    alone = PackedRunner(pack_gpt(made(), "fp32"), threads=3)
    session = alone.session(slots=1, capacity=24)
    for at, token in enumerate(IDS):
        got = session.read([0], [[token]])[0].logits
        np.testing.assert_array_equal(got, expected[at : at + 1])
    assert [queue.qsize() for queue in session._crew._work] == [crew.BEHIND] * 2


def test_helpers_end_with_their_session(runner):
    before = threading.active_count()
    session = runner.session(slots=1, capacity=8)
    session.read([0], [[1]])
    assert threading.active_count() == before + 2
    helpers = threading.enumerate()[-2:]
    del session
    for helper in helpers:
        helper.join(timeout=20)
    assert not any(helper.is_alive() for helper in helpers)
