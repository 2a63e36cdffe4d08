"""Many clients, of whom some disconnect, and many requests leak nothing."""

import gc
import http.client
import json
import multiprocessing
import os
import random
import threading
from types import SimpleNamespace

import pytest

from tests.conftest import TEXT, opinionated
from tests.serve.conftest import Running
from tests.serve.test_completions import BODIES, HOSTILE
from tests.serve.test_operation import read, send, until
from tiedgpt import Tokenizer
from tiedgpt.infer import Engine
from tiedgpt.serve.app import create_app
from tiedgpt.serve.guards import Limits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts are Linux's"),
]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve_alone(pipe):
    """Serve, and send the port; then answer each message with the memory that is resident."""
    tokenizer = Tokenizer.train([TEXT], 300)
    with (
        Engine(opinionated(tokenizer), tokenizer=tokenizer, slots=4, queue_size=8) as engine,
        Running(create_app(engine, name="tiny"), engine, Limits(queue=8)) as running,
    ):
        pipe.send(running.port)
        while pipe.recv():
            gc.collect()
            pipe.send(resident())


@pytest.fixture
def alone():
    """A server in its own process, so that its memory is measured alone."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_alone, args=(there,))
    process.start()
    yield SimpleNamespace(port=here.recv(), resident=lambda: here.send(True) or here.recv())
    here.send(False)
    process.join(30)
    assert process.exitcode == 0


@pytest.fixture
def roomy(engine):
    limits = Limits(queue=8, header_seconds=1, body_seconds=1)
    with Running(create_app(engine, name="tiny", limits=limits), engine, limits) as running:
        yield running


def test_survivors_of_64_streams_equal_solo_runs_and_leave_nothing(roomy, engine):
    """The engine takes 12 texts; the others are told to try again, and do."""
    alone = engine.generate("the cat", max_new_tokens=40, temperature=0).text
    body = {"prompt": "the cat", "max_tokens": 40, "temperature": 0, "stream": True}
    drawn, found = random.Random(0), []
    before = 0

    def one(leaves):
        while (connection := send(roomy.port, body)) is not None:
            head = connection.recv(12)
            if b"429" not in head:
                break
            connection.close()
            threading.Event().wait(0.01)
        if leaves is not None:
            threading.Event().wait(leaves)
            connection.close()
            return
        lines = [x for x in read(connection).split("\n") if x.startswith("data: {")]
        found.append("".join(json.loads(x[6:])["choices"][0]["text"] for x in lines))

    for turn in range(10):
        leaving = [drawn.random() * 0.1 if n % 2 else None for n in range(64)]
        threads = [threading.Thread(target=one, args=(leaves,)) for leaves in leaving]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
        until(lambda: not roomy.server.server_state.tasks)
        if turn == 0:
            before = descriptors()
        until(lambda most=before + 2: descriptors() <= most)
    assert found == [alone] * 320


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
    """Once threads have their arenas, which takes some forty turns."""
    fields = [{"prompt": "a"} | {name: value} for name in HOSTILE for value in HOSTILE[name]]
    bodies = [*BODIES, *(json.dumps(body).encode() for body in fields)]
    assert len(BODIES) > 25 and len(fields) > 60
    for turn in range(72):
        for body in bodies:
            connection = http.client.HTTPConnection("127.0.0.1", alone.port)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            assert connection.getresponse().status == 400
            connection.close()
        if turn == 47:
            before = alone.resident()
    assert alone.resident() - before < 4
