"""How many threads compute, whatever computes."""

import os
import threading
from copy import copy, deepcopy

import numpy as np
import pytest
import torch

from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.infer.torch_session import torch_threads


@pytest.fixture
def torchs(engine, monkeypatch):
    """The numbers of threads that torch has computed with."""
    seen = []
    body = engine.model.body

    def noted(*given, **more):
        seen.append(torch.get_num_threads())
        return body(*given, **more)

    monkeypatch.setattr(engine.model, "body", noted)
    return seen


@pytest.mark.parametrize("threads", [0, -1, 257, 1.0, "2", True, 2**70])
def test_an_invalid_number_of_threads_is_refused_by_every_runner(engine, packed, threads):
    for source in (engine.model, packed):
        with pytest.raises(UserError, match="threads must be an integer from 1 to 256, got"):
            Engine(source, threads=threads)


def test_kernels_compute_the_same_on_the_requested_threads(packed):
    several, one = Engine(packed, threads=np.int64(3)), Engine(packed, threads=1)
    assert (several.runner.threads, one.runner.threads) == (3, 1)
    before = set(threading.enumerate())
    stream = several.stream("the cat", max_new_tokens=12, temperature=0)
    first = next(stream)
    assert len(set(threading.enumerate()) - before) == 3  # two that help, and the engine's worker
    assert first.text + "".join(token.text for token in stream) == stream.result().text
    assert stream.result().text == one.generate("the cat", max_new_tokens=12, temperature=0).text


def test_by_default_a_process_uses_the_cores_of_its_affinity(packed, monkeypatch):
    for cores, threads in ({0, 5}, 2), (set(range(64)), 16):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores, raising=False)
        assert Engine(packed).runner.threads == threads
    assert Engine(packed, threads=64).runner.threads == 64


def test_torch_uses_the_engines_threads_and_its_number_is_restored(engine, torchs):
    own = torch.get_num_threads()
    asked = Engine(engine.model, tokenizer=engine.tokenizer, threads=own + 2)
    assert (asked.backend, asked.model) == ("torch", engine.model)
    text = asked.generate("the cat", max_new_tokens=4, temperature=0).text
    assert set(torchs) == {own + 2} and torch.get_num_threads() == own
    torchs.clear()
    assert engine.generate("the cat", max_new_tokens=4, temperature=0).text == text
    assert set(torchs) == {own}
    stream = asked.stream("the cat", max_new_tokens=4, temperature=0)
    next(stream)
    assert torch.get_num_threads() == own
    with pytest.raises(UserError):
        asked.runner.session(n_slots=1, capacity=8).read([0], [[10**6]])
    assert torch.get_num_threads() == own


def test_torch_uses_the_number_of_threads_of_the_calling_thread(engine, torchs):
    own = torch.get_num_threads()
    engine.generate([5], max_new_tokens=2)
    try:
        torch.set_num_threads(own + 1)
        engine.generate([5], max_new_tokens=2)
    finally:
        torch.set_num_threads(own)
    assert set(torchs) == {own, own + 1}


def test_torchs_number_of_threads_is_restored_after_several_engines():
    own = torch.get_num_threads()
    inside, leave = threading.Event(), threading.Event()

    def use():
        with torch_threads(own + 2):
            inside.set()
            assert leave.wait(20)

    other = threading.Thread(target=use)
    with torch_threads(own + 1):
        other.start()
        assert inside.wait(20)
    assert torch.get_num_threads() == own
    leave.set()
    other.join()
    assert torch.get_num_threads() == own


def test_a_runner_with_threads_can_be_copied(engine):
    runner = Engine(engine.model, threads=1, backend="torch").runner
    assert copy(runner).threads == deepcopy(runner).threads == 1
