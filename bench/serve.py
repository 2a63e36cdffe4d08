"""8 concurrent streams over HTTP: ours against the engine's own batch of 8, and llama-cpp-python.

    python bench/serve.py [--size gpt2] [--tokens 96] [--rounds 5] [--class avx2] [--busy 2]

`tiedgpt serve` (int8) and `python -m llama_cpp.server` (Q8_0; of llama-cpp-python[server]) listen
on the loopback. The engine is this process, and so are the clients, which read the streams on the
same cores. All continue the same prompts greedily, in turn; no prompt comes twice. Ratios are
medians over rounds. The time to first token is that of the 8 streams, which begin at once, and of a
ninth that comes while they are served (for which we have a slot; llama-cpp-python serves one stream
after another). Before all that a prompt of a whole context is scored, and the server's memory
watched (Linux); and clients leave while a prompt of 1,000 tokens is read.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpu_class import add_class, use_class
from formats import Files, add_options, files_of
from tiedgpt.infer import Engine
from tiedgpt.serve.server import open_socket
from turns import busy, cores, facts, keep, show

STREAMS = 8
PEER = "llama-cpp-python"
QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SECONDS = 120
"""For a server to begin, and for one answer."""


def prompt(number: int) -> str:
    return f"{number}: the quick brown fox jumps over the lazy dog, and nobody knows why."


def post(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return response


def first_token(port: int, number: int, tokens: int) -> float:
    """Read a stream to its end; return the seconds until its first text came."""
    began, first, ended = time.perf_counter(), 0.0, None
    body = {"prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "stream": True}
    for line in post(port, body):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            if choice["text"] and not first:
                first = time.perf_counter() - began
            ended = choice["finish_reason"]
    assert ended == "length", "a text ended before all its tokens were written"
    return first


def streamed(port: int, turn: int, tokens: int) -> tuple[float, list[float]]:
    """Read 8 streams at a time; return the seconds, and those until each one's first text."""
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        numbers = range(100 * turn, 100 * turn + STREAMS)
        firsts = list(pool.map(lambda number: first_token(port, number, tokens), numbers))
    return time.perf_counter() - began, firsts


def ninth(port: int, tokens: int) -> float:
    """Return the seconds until the first text of a stream that comes while 8 are read."""
    with ThreadPoolExecutor(STREAMS) as pool:
        for number in range(STREAMS):
            pool.submit(first_token, port, 100_000 + number, tokens)
        time.sleep(0.5)
        return first_token(port, 100_000 + STREAMS, 2)


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    """Run a server on a port; yield its process id once it answers."""
    process = subprocess.Popen([sys.executable, "-m", *command], **QUIET)
    try:
        end = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
                connection.request("GET", "/v1/models")
                if connection.getresponse().status == 200:
                    break
            assert process.poll() is None and time.monotonic() < end, f"no answer: {command}"
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(SECONDS)


def free_port() -> int:
    with open_socket("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def scoring(port: int, process: int, engine: Engine) -> dict[str, float]:
    """Score a prompt of a whole context; return seconds and how much memory that took."""
    length, vocabulary = engine.runner.config.n_positions, engine.runner.config.vocab_size
    body = {"prompt": [(31 + 7919 * at) % 50_000 for at in range(length)], "max_tokens": 0,
            "echo": True, "logprobs": 1}  # fmt: skip
    post(port, body | {"prompt": [1, 2, 3]}).read()
    before = megabytes(process, "VmRSS")
    began = time.perf_counter()
    found = json.loads(post(port, body).read())["choices"][0]["logprobs"]["token_logprobs"]
    seconds = time.perf_counter() - began
    assert len(found) == length
    return {
        "tokens": length,
        "seconds": round(seconds, 3),
        "MB more at the peak": round(megabytes(process, "VmHWM") - before),
        "MB of all logits": round(length * vocabulary * 4 / 2**20),
    }


def freed(port: int, tries: int = 12) -> list[float]:
    """Leave while a prompt of 1,000 tokens is read; return the seconds until its slot is free."""
    found = []
    for number in range(tries):
        prompt = [(31 + 7919 * at + 104_729 * number) % 50_000 for at in range(1000)]
        response = post(port, {"prompt": prompt, "max_tokens": 4, "stream": True})
        time.sleep(0.02 + 0.4 * number / tries)
        began = time.perf_counter()
        response.close()
        while n_active(port):
            time.sleep(0.002)
        found.append(time.perf_counter() - began)
    return found


def n_active(port: int) -> float:
    """Return how many texts hold a slot or wait for one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(map(float, re.findall(r"^tiedgpt:num_requests_\w+ (.*)$", text, re.MULTILINE)))


def megabytes(process: int, name: str) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) / 1024


def measured(files: Files, args: argparse.Namespace) -> dict[str, Any]:
    """Return the text of a row."""
    names = ("ours", PEER) if "llama.cpp" in args.peers else ("ours",)
    ports, threads = {name: free_port() for name in names}, str(args.threads)
    ours = ["tiedgpt", "serve", str(files.packed("int8")), "--slots", str(STREAMS + 1)]
    ours += ["--threads", threads, "--port", str(ports["ours"])]
    peer = ["llama_cpp.server", "--n_ctx", "1024", "--host", "127.0.0.1"]
    peer += ["--n_threads", threads, "--n_threads_batch", threads, "--logits_all", "false"]
    peer += ["--interrupt_requests", "false", "--verbose", "false"]
    seconds: dict[str, list[float]] = {"engine": [], **{name: [] for name in ports}}
    firsts: dict[str, list[float]] = {name: [] for name in ports}
    with contextlib.ExitStack() as stack:
        packed = files.packed("int8")
        engine = stack.enter_context(Engine(packed, slots=STREAMS + 1, threads=args.threads))
        process = stack.enter_context(running(ours, ports["ours"]))
        if PEER in ports:
            peer += ["--model", str(files.gguf("q8_0")), "--port", str(ports[PEER])]
            stack.enter_context(running(peer, ports[PEER]))
        scored = scoring(ports["ours"], process, engine)
        left = freed(ports["ours"])
        with busy(args.busy):
            for turn in range(args.rounds + 1):
                prompts = [prompt(100 * turn + number) for number in range(STREAMS)]
                began = time.perf_counter()
                engine.generate(prompts, max_new_tokens=args.tokens, temperature=0)
                found = {"engine": time.perf_counter() - began}
                for name, port in ports.items():
                    found[name], its = streamed(port, turn, args.tokens)
                    firsts[name] += its if turn else []
                for name in found if turn else ():  # the first round warms up
                    seconds[name].append(found[name])
            late = {name: ninth(port, args.tokens) for name, port in ports.items()}

    def ratio(of: str) -> float | None:
        if of not in seconds:
            return None
        pairs = zip(seconds[of], seconds["ours"], strict=True)
        return round(statistics.median(theirs / own for theirs, own in pairs), 3)

    count = STREAMS * args.tokens
    return {
        "tokens": args.tokens,
        "busy processes": args.busy,
        "tokens/s": {n: round(count / statistics.median(s), 1) for n, s in seconds.items()},
        "ours to the engine's own": ratio("engine"),
        f"ours to {PEER}": ratio(PEER),
        "first token, ms": {
            name: {
                "median": round(1e3 * statistics.median(its)), "worst": round(1e3 * max(its)),
                "ninth": round(1e3 * late[name]),
            }
            for name, its in firsts.items()
        },
        "scoring a prompt": scored,
        "slot freed after, ms": {
            "median": round(1e3 * statistics.median(left)), "worst": round(1e3 * max(left))
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    add_class(parser)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--peers", nargs="*", default=["llama.cpp"], help="none: ours alone")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    args = parser.parse_args()
    use_class(args)
    if args.quick:
        args.rounds, args.tokens = 1, 8
    with files_of(args) as files:
        row = {**facts(args), **measured(files, args)}
    keep("serve", row, args.quick)
    rates, firsts = row["tokens/s"], row["first token, ms"]
    ratios = {"engine": row["ours to the engine's own"], PEER: row[f"ours to {PEER}"]}
    show(
        f"{STREAMS} streams of {args.tokens} tokens",
        {
            name: (rate, ratios.get(name), *firsts.get(name, {}).values())
            for name, rate in rates.items()
        },
        ("tokens/s", "ours to it", "first: median ms", "worst ms", "ninth's ms"),
    )
    for about in ("scoring a prompt", "slot freed after, ms"):
        print(f"\n{about}: {', '.join(f'{name} {value}' for name, value in row[about].items())}")


if __name__ == "__main__":
    main()
