"""Many requests leak no memory."""

import gc
import http.client
import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from tests.models import TEXT, opinionated
from tests.serve.conftest import Running
from tests.serve.test_completions import BODIES, HOSTILE
from tiedgpt import Tokenizer
from tiedgpt.infer import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts are Linux's"),
]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve_alone(pipe):
    """Serve, and send the port; then answer each message with the memory that is resident."""
    tokenizer = Tokenizer.train([TEXT], 300)
    with (
        Engine(opinionated(tokenizer), tokenizer=tokenizer, slots=4, queue_size=8) as engine,
        Running(engine) as running,
    ):
        pipe.send(running.port)
        while pipe.recv():
            gc.collect()
            pipe.send(resident())


@pytest.fixture
def alone(monkeypatch):
    """A server in its own process, so that its memory is measured alone.

    Its threads share one arena of malloc. With one each, memory grows while the threads take turns.
    """
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_alone, args=(there,))
    process.start()
    yield SimpleNamespace(port=here.recv(), resident=lambda: here.send(True) or here.recv())
    here.send(False)
    process.join(30)
    assert process.exitcode == 0


def test_memory_is_flat_over_10_000_requests(alone):
    connection = http.client.HTTPConnection("127.0.0.1", alone.port)
    data = json.dumps({"prompt": "the cat", "max_tokens": 2, "logprobs": 2, "echo": True})
    headers = {"content-type": "application/json"}
    for number in range(10_000):
        connection.request("POST", "/v1/completions", data, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        if number == 2_000:
            before = alone.resident()
    connection.close()
    assert alone.resident() - before < 8


def test_memory_is_flat_over_hostile_requests(alone):
    """Once malloc's arena is full, which takes up to a hundred turns."""
    fields = [{"prompt": "a"} | {name: value} for name in HOSTILE for value in HOSTILE[name]]
    bodies = [*BODIES, *(json.dumps(body).encode() for body in fields)]
    assert len(BODIES) > 25 and len(fields) > 60
    for turn in range(144):
        for body in bodies:
            connection = http.client.HTTPConnection("127.0.0.1", alone.port)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            assert connection.getresponse().status == 400
            connection.close()
        if turn == 107:
            before = alone.resident()
    assert alone.resident() - before < 4
