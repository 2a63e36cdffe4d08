"""On a socket: clients that go away, dawdle, or are many; and the end."""

import contextlib
import copy
import http.client
import json
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import Running
from tiedgpt.data import TEMPLATES
from tiedgpt.infer import Engine
from tiedgpt.serve.app import create_app
from tiedgpt.serve.guards import Limits
from tiedgpt.serve.server import Server, open_socket

LONG = {"prompt": "the cat", "max_tokens": 44, "logit_bias": {"7": 100}, "stream": True}
RESPONSE = {"input": "the cat", "logit_bias": {"7": 100}, "stream": True}


def send(port, body, path="/v1/completions", receive_buffer=None):
    """Send a request; return its socket."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.socket()
    connection.settimeout(20)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def read(connection):
    """Read until the other side closes, or the response has its end; close."""
    found = b""
    with connection:
        while b"[DONE]" not in found and (part := connection.recv(65_536)):
            found += part
    return found.decode()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def slow(engine, monkeypatch):
    """The engine takes 20 ms a step."""
    session = type(engine.runner.session(n_slots=1, capacity=8))
    read = session.read

    def slowly(self, *arguments, **named):
        time.sleep(0.02)
        return read(self, *arguments, **named)

    monkeypatch.setattr(session, "read", slowly)


def test_inspections_and_embeddings_wait_in_a_queue_that_clients_can_leave(engine):
    """One is computed, `queue` wait; nothing is computed for clients that left."""
    seen, is_loading, go_on = [], threading.Event(), threading.Event()

    def load():
        is_loading.set()
        assert go_on.wait(60)
        model = copy.deepcopy(engine.model)
        model.wte.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].tolist()))
        return model

    def embed(id):
        return send(running.port, {"input": [id]}, "/v1/embeddings")

    with Running(engine, Limits(queue=4), load=load) as running:
        first = embed(1)
        assert is_loading.wait(60)
        tasks = running.server.server_state.tasks
        leavers = [embed(id) for id in (2, 3)]
        stays = [send(running.port, {"ids": [4]}, "/inspect/positions"), embed(5)]
        until(lambda: len(tasks) == 5)
        with embed(6) as refused:
            assert b"429" in refused.recv(12)
        for connection in leavers:
            connection.close()
        until(lambda: len(tasks) == 3)
        last = embed(7)
        until(lambda: len(tasks) == 4)
        go_on.set()
        for connection in (first, *stays, last):
            with connection:
                assert connection.recv(12) == b"HTTP/1.1 200"
    assert seen[0] == [[1]] and seen[-2:] == [[[5]], [[7]]]
    assert [[2]] not in seen and [[3]] not in seen and [[6]] not in seen


def test_a_class_of_thirty_opens_the_page_without_a_refusal(engine):
    """Each page asks for one inspection after another."""
    statuses = []
    with Running(engine, Limits()) as running:

        def open_page():
            for name in ("positions", "dot", "lens", "attention", "random_head"):
                with send(running.port, {"text": "the cat sat"}, f"/inspect/{name}") as connection:
                    statuses.append(connection.recv(12))

        threads = [threading.Thread(target=open_page) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert statuses == [b"HTTP/1.1 200"] * 150


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_disconnects_frees_its_slot(running, engine, slow, stream):
    before = engine.stats()["generated_tokens"]
    long = LONG | {"max_tokens": 16 * 48, "context_end": "slide", "stream": stream}
    connections = [send(running.port, long) for _ in range(6)]
    until(lambda: (engine.stats()["running"], engine.stats()["waiting"]) == (4, 2))
    for connection in connections:
        connection.close()
    until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
    assert engine.stats()["generated_tokens"] - before < 4 * 16 * 48


def test_survivors_of_64_streams_equal_solo_runs_and_leave_nothing(engine):
    """The engine takes 12 texts; the others are told to try again, and do."""
    alone = engine.generate("the cat", max_new_tokens=30, temperature=0).text
    body = {"prompt": "the cat", "max_tokens": 30, "temperature": 0, "stream": True}
    dice, written = random.Random(0), []

    def one(leaves):
        while b"429" in (head := (connection := send(running.port, body)).recv(12)):
            connection.close()
            time.sleep(0.01)
        if leaves is not None:
            time.sleep(leaves)
            connection.close()
            return
        lines = [x for x in (head.decode() + read(connection)).split("\n") if x[:7] == "data: {"]
        written.append("".join(json.loads(x[6:])["choices"][0]["text"] for x in lines))

    with Running(engine) as running:
        for turn in range(2):
            with ThreadPoolExecutor(64) as pool:
                list(pool.map(one, [dice.random() * 0.1 if n % 2 else None for n in range(64)]))
            until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
            until(lambda: not running.server.server_state.tasks)
            if turn == 0:
                before = len(os.listdir("/proc/self/fd"))
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
    assert written == [alone] * 64


def test_slow_senders_are_closed_at_the_deadline_while_others_are_served(engine):
    with Running(engine, Limits(queue=8, header_seconds=0.5, body_seconds=0.5)) as running:
        heads = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        for connection in heads:
            connection.sendall(b"POST /v1/comp")
        bodies = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        for connection in bodies:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
            )
        assert "[DONE]" in read(send(running.port, LONG))
        for connection in heads + bodies:
            connection.settimeout(20)
        assert all("408" in connection.recv(100).decode() for connection in bodies)
        for connection in heads:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        for connection in heads + bodies:
            connection.close()


def test_every_request_gets_503_until_the_model_is_loaded(engine):
    def ask(method, path):
        client = http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=20)
        with contextlib.closing(client):
            client.request(method, path, b"{}" if method == "POST" else None)
            response = client.getresponse()
            return response.status, response.getheader("retry-after"), response.read()

    limits = Limits()
    with open_socket("127.0.0.1", 0) as listener:
        server = Server(limits)
        with server.listening(listener) as ended:
            for method, path in [
                ("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("GET", "/"),
                ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"), ("DELETE", "/nowhere"),
            ]:  # fmt: skip
                status, retry_after, body = ask(method, path)
                assert (status, retry_after) == (503, "1")
                if method != "HEAD":
                    error = json.loads(body)["error"]
                    assert error.keys() == {"message", "type", "param", "code"}
                    assert error["code"] == "loading"
            server.open(create_app(engine, limits=limits), engine)
            assert [ask("GET", path)[0] for path in ("/health", "/ready", "/")] == [200] * 3
            assert not ended.done()
        assert ended.done()


def test_metrics_begin_with_the_application(engine):
    """Tokens that the engine wrote before, as in a warm-up, are not counted."""
    engine.generate([1, 2, 3], max_new_tokens=5)
    client = TestClient(create_app(engine), base_url="http://127.0.0.1")

    def counters():
        lines = [line for line in client.get("/metrics").text.splitlines() if line[:1] != "#"]
        pairs = (line.rsplit(" ", 1) for line in lines)
        names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "engine_seconds_total")  # fmt: skip
        values = {key.partition("{")[0].removeprefix("tiedgpt:"): float(n) for key, n in pairs}
        return [values[name] for name in names]

    assert counters() == [0, 0, 0, 0, 0]
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "logit_bias": {"7": 100}}
    assert client.post("/v1/completions", json=body).status_code == 200
    *tokens, seconds = counters()
    assert tokens == [3, 2, 3, 0] and seconds > 0


def test_running_texts_finish_when_the_server_is_stopped(engine, slow):
    n_texts = []
    with Running(engine) as running:
        running.server.on_drain = n_texts.append
        connection = send(running.port, LONG | {"n": 7})
        connection.recv(100)
        running.server.handle_exit(15, None)
        refused = read(send(running.port, LONG))
        assert " 503 " in refused and "retry-after: 1" in refused and "connection: close" in refused
        assert "[DONE]" in read(connection)
    assert n_texts == [7], "four in slots and three that wait"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", running.port), timeout=1)


def test_a_slow_reader_does_not_delay_others(running, engine):
    slow = send(running.port, LONG | {"n": 4})
    assert "[DONE]" in read(send(running.port, LONG)), "although nobody reads the first"
    assert "[DONE]" in read(slow)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused_before_it_is_received(running, chunked):
    size = "Transfer-Encoding: chunked" if chunked else "Content-Length: 10000000000"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{size}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(head[:30])
        with send(running.port, {"max_tokens": 1}) as other:
            other.recv(9)  # the server has read the first part of the headers
        connection.sendall(head[30:])
        with contextlib.suppress(ConnectionError):
            for _ in range(17 if chunked else 0):
                connection.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
        assert "413" in connection.recv(65_536).decode().split("\r\n")[0]


def test_a_client_that_sends_a_whole_large_body_receives_the_refusal(running):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(head)
        for _ in range(320):  # 20 MiB, far more than the socket's buffers hold
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert b" 413 " in answer and b'"code":"body_too_large"' in answer


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 17), 431, b"65,536 bytes"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, b"no valid HTTP/1.1 request"),
    ],
)
def test_invalid_http_is_answered_in_openais_format(running, sent, status, said):
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(2000):
                answer += part
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert b'{"error":{"message":' in answer and said in answer


def test_texts_that_exceed_the_shutdown_time_end_with_an_error_event(engine, slow):
    with (
        Engine(engine.model, tokenizer=engine.tokenizer) as other,
        Running(other, Limits(drain_seconds=0.2), template=TEMPLATES["plain"]) as running,
        send(running.port, LONG) as connection,
        send(running.port, RESPONSE, "/v1/responses") as response,
        send(running.port, LONG | {"stream": False}) as whole,
    ):
        connection.recv(100)
        until(lambda: other.stats()["running"] == 3)
        running.server.handle_exit(15, None)
        assert '"error":{"message":"the server is ending"' in read(connection)
        fields = '"code":"shutting_down","message":"the server is ending","param":null}'
        assert fields in read(response), "as openai's ResponseErrorEvent"
        assert b"503" in whole.recv(100)


def test_a_client_that_reads_nothing_loses_its_slots_at_the_deadline(engine):
    with Running(engine, Limits(queue=8, send_seconds=0.2)) as running:
        running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for stream in (True, False):
            body = LONG | {"n": 8, "logprobs": 20, "stream": stream}
            with send(running.port, body, receive_buffer=2048):
                until(lambda: running.server.server_state.connections)
                until(lambda: not running.server.server_state.connections)
                until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
