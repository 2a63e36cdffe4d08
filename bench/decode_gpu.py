"""Tokens a second on a GPU: ours as CUDA graphs and without them, against transformers.

    python bench/decode_gpu.py [--size gpt2] [--batch 1 8 32] [--precision bf16 fp32] [--compile]

As `bench/decode.py` on CPUs: everyone in turn reads prompts of 64 ids, or 900, then decodes tokens
greedily in each; logits are fetched and the largest is taken on the host, by us; transformers takes
it on the GPU. Ratios are medians over rounds. The limit of memory is read bandwidth, measured in
every round, over the bytes that a step streams: all weights but `wpe`, and the keys and values.
`--device cpu --quick` tries the script where there is no GPU: steps are repeated without graphs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Literal

import torch

from formats import Files, add_options, files_of
from peers import transformers
from tiedgpt import GPT, GPTConfig
from tiedgpt.infer.torch_session import DTYPES, TorchRunner
from turns import Times, cores, facts, faster_by, in_turn, keep, per_second, prompts, show
from ways import Room, Way, in_session

SPANS = ((64, 128), (900, 120))
"""Prompt, and tokens after it."""
GRAPHS, EAGER = "ours", "ours without graphs"
READ = "read bandwidth"
LIMIT = "ours over the bandwidth's limit (median of ratios)"


def read_bandwidth(device: str, n_bytes: int, times: int = 10) -> float:
    """Return bytes a second of a sum over memory, the best of some."""
    numbers = torch.ones(n_bytes // 4, device=device)
    best = 0.0
    for _ in range(times):
        began = time.perf_counter()
        numbers.sum().item()
        best = max(best, n_bytes / (time.perf_counter() - began))
    return best


def streamed_bytes(config: GPTConfig, itemsize: int, batch: int, positions: float) -> float:
    """Return the bytes that a step must read: weights, and keys and values of that many."""
    weights = config.parameter_count() - config.n_positions * config.n_embd
    return itemsize * (weights + 2 * config.n_layer * config.n_embd * positions * batch)


def ours(files: Files, room: Room, precision: str, device: str, graphs: bool) -> Way:
    """A session of the model in torch."""
    model = GPT.from_pretrained(files.hf, dtype=DTYPES[precision]).to(device)
    decode: Literal["static", "ragged"] = "static" if graphs else "ragged"
    runner = TorchRunner(model, decode=decode)
    return in_session(runner.session(slots=room.slots, capacity=room.capacity))


def measure(
    ways: dict[str, Way], batch: int, length: int, n: int, given: argparse.Namespace
) -> tuple[Times, list[float]]:
    """Return each one's seconds for n tokens in every round, and bytes a second read."""
    texts = prompts(batch, length)
    n_bytes = 1 << 24 if given.quick else 1 << 32
    turns = {READ: lambda: read_bandwidth(given.device, n_bytes)} | {
        name: (lambda way=way: way(texts, n)[1]) for name, way in ways.items()
    }
    seconds = in_turn(turns, given.rounds)
    read = seconds.pop(READ)
    return seconds, read


def one_setting(precision: str, batch: int, files: Files, given: argparse.Namespace) -> None:
    """Measure a precision and a number of sequences at both lengths; keep and show it."""
    config = GPTConfig.preset(given.size)
    room = Room(batch, config.n_positions, given.threads)
    where = {"precision": precision, "device": given.device}
    peer = f"transformers {precision}"
    ways = {
        GRAPHS: ours(files, room, graphs=True, **where),
        EAGER: ours(files, room, graphs=False, **where),
        peer: transformers(files, room, **where),
    }
    if given.compile:
        ways[f"{peer} compiled"] = transformers(files, room, compiled=True, **where)
    for length, n in ((16, 8),) if given.quick else SPANS:
        seconds, read = measure(ways, batch, length, n, given)
        itemsize = 4 if precision == "fp32" else 2
        streamed = streamed_bytes(config, itemsize, batch, length + n / 2)
        fractions = [n * streamed / t / b for t, b in zip(seconds[GRAPHS], read, strict=True)]
        row: dict[str, Any] = {
            **facts(given),
            "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
            "precision": precision,
            "sequences": batch,
            "positions": [length, length + n],
            "tokens/s": per_second(seconds, batch * n),
            "ours is faster by (median of ratios)": faster_by(seconds, GRAPHS),
            "read bandwidth, GB/s": round(statistics.median(read) / 1e9, 1),
            "MB a step streams, ours": round(streamed / 1e6, 1),
            LIMIT: round(statistics.median(fractions), 3),
        }
        keep("decode-gpu", row, given.quick)
        ratios = row["ours is faster by (median of ratios)"]
        show(
            f"{precision}, {batch} sequences, positions {length} to {length + n}: ours at "
            f"{row[LIMIT]:.0%} of the limit of {row['read bandwidth, GB/s']} GB/s",
            {w: (rate, ratios.get(w)) for w, rate in row["tokens/s"].items()},
            ("tokens/s", "ours faster by"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16"])
    parser.add_argument("--compile", action="store_true", help="transformers compiled, too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, default=cores())
    given = parser.parse_args()
    if given.quick:
        given.rounds = 1
    with files_of(given) as files:
        for precision in given.precision:
            for batch in given.batch:
                one_setting(precision, batch, files, given)


if __name__ == "__main__":
    main()
