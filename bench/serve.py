"""8 concurrent streams over HTTP against the engine's own batch of 8, on the same cores.

    python bench/serve.py MODEL [--precision int8] [--tokens 96] [--rounds 5]

The server runs in a thread of this process, on the loopback; the clients are a process of their
own, which reads the streams as a browser would, and competes for the cores. Engine and server
generate the same texts in turn; printed are medians, of ratios too, and the time to first token of
a ninth client that comes while eight are served.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import threading
import time

from tiedgpt.infer import Engine
from tiedgpt.serve.app import create_app
from tiedgpt.serve.guards import Limits
from tiedgpt.serve.server import Server, open_socket

STREAMS = 8


def prompt(number: int) -> list[int]:
    return [(7919 * (at + 131 * number)) % 50_000 for at in range(32)]


def stream(port: int, number: int, tokens: int, found: list[tuple[float, float]]) -> None:
    """Read one stream; note when its first token came and when it ended, from the request on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "stream": True,
            "logit_bias": {"50256": -100}, "logprobs": 0}  # fmt: skip
    began, first = time.perf_counter(), 0.0
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"content-type": "application/json"})  # fmt: skip
    response, n = connection.getresponse(), 0
    for line in response:
        if line.startswith(b"data: {"):
            n += bool(json.loads(line[6:])["choices"][0]["logprobs"])
            first = first or time.perf_counter() - began
    assert response.status == 200 and n == tokens, (response.status, n)
    found.append((first, time.perf_counter() - began))
    connection.close()


def clients(port: int, tokens: int, late: float, results: multiprocessing.Queue) -> None:
    """Read 8 streams at a time, and a ninth that comes after `late` seconds if that is not 0."""
    found: list[tuple[float, float]] = []
    ninth: list[tuple[float, float]] = []
    each = [
        threading.Thread(target=stream, args=(port, number, tokens, found))
        for number in range(STREAMS)
    ]
    began = time.perf_counter()
    for thread in each:
        thread.start()
    if late:
        time.sleep(late)
        stream(port, STREAMS, 2, ninth)
    for thread in each:
        thread.join()
    seconds = time.perf_counter() - began
    results.put((STREAMS * tokens / seconds, max(found)[0], ninth[0][0] if ninth else 0.0))


def served(port: int, tokens: int, late: float = 0.0) -> tuple[float, float, float]:
    """Return tokens a second, the latest first token, and the ninth's."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=clients, args=(port, tokens, late, results))
    process.start()
    answer: tuple[float, float, float] = results.get()
    process.join()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = []
    with (
        Engine(given.model, given.precision, slots=STREAMS + 1) as engine,
        open_socket("127.0.0.1", 0) as listener,
    ):
        server = Server(create_app(engine), engine, Limits())
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        port = listener.getsockname()[1]
        prompts = [prompt(number) for number in range(STREAMS)]
        for turn in range(given.rounds + 1):
            began = time.perf_counter()
            engine.generate(
                prompts, max_new_tokens=given.tokens, temperature=0, logit_bias={50256: -100.0}
            )
            alone = STREAMS * given.tokens / (time.perf_counter() - began)
            rate, first, _ = served(port, given.tokens)
            if turn:  # the first compiles and warms up
                rows.append((alone, rate, rate / alone, first))
        *_, ninth = served(port, given.tokens, late=0.5)
        server.should_exit = True
        thread.join()
    alone, rate, ratio, first = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"engine {alone:.0f} tokens/s, served {rate:.0f}, ratio {ratio:.3f}")
    print(f"first token of 8 at once: {first * 1e3:.0f} ms; of a ninth: {ninth * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
