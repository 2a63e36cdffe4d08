"""Tokens a second of one sequence, ours against llama.cpp, CTranslate2, onnxruntime, transformers.

    python bench/decode.py [--size gpt2] [--classes fp32 bf16 int8 4-bit] [--class avx2] [--busy 2]

Class by class (fp32; bf16; 8-bit; 4-bit), everyone in turn: a prompt is read, then 128 tokens are
decoded greedily, at positions 64 to 192, and 120 at 900 to 1,020. Ratios are medians over rounds;
llama.cpp runs with and without flash attention, and the faster one counts. The limit of memory is
read bandwidth, measured in every round, over the bytes that a token streams: all packed arrays but
`wpe`, and the keys and values. Memory: each alone in a fresh process, its whole peak. With --busy,
32 tokens are decoded at positions 64 to 96.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import numpy as np

from bandwidth import Bandwidth
from cpu_class import add_class, use_class
from formats import Files, add_options, files_of
from peers import open_way
from tiedgpt import GPTConfig
from tiedgpt.infer.packed_session import ACTIVATION_DTYPES
from tiedgpt.weights.formats.packed import layout
from tiedgpt.weights.formats.packed.panels import padded
from turns import (
    Times,
    better_flash,
    busy,
    cores,
    facts,
    faster_by,
    in_turn,
    keep,
    peak_megabytes,
    per_second,
    prompts,
    show,
)
from ways import CLASSES, Room, Way, add_choice, names_of

SPANS = ((64, 128), (900, 120))
"""Prompt, and tokens after it."""
QUICK_SPAN, BUSY_SPAN = (16, 8), (64, 32)
"""The one span of a quick run, and of a run beside busy processes, in which peers are slow."""
READ = "read bandwidth"
LIMIT = "ours over the bandwidth's limit (median of ratios)"


def streamed_bytes(config: GPTConfig, precision: str, positions: float) -> float:
    """Return the bytes that a token must read: weights, and keys and values of that many."""
    weights = sum(
        math.prod(shape) * np.dtype(dtype).itemsize
        for name, (shape, dtype) in layout(config, precision).items()
        if name != "wpe"
    )
    dtype = np.dtype(ACTIVATION_DTYPES[precision])
    vector = padded(config.head_dim) * dtype.itemsize + (4 if dtype == np.int8 else 0)
    return weights + 2 * config.n_layer * config.n_head * vector * positions


def measure(
    ways: dict[str, Way], bandwidth: Bandwidth, length: int, n: int, rounds: int
) -> tuple[Times, list[float]]:
    """Return each one's seconds for n tokens in every round, and bytes a second read."""
    prompt = prompts(1, length)
    turns = {READ: bandwidth} | {
        name: (lambda way=way: way(prompt, n)[1]) for name, way in ways.items()
    }
    seconds = in_turn(turns, rounds)
    read = seconds.pop(READ)
    return better_flash(seconds), read


def one_class(name: str, files: Files, args: argparse.Namespace) -> None:
    """Measure a class at both lengths; keep and show it."""
    precision = CLASSES[name][0]
    me, *_ = names = names_of(name, args)
    config = GPTConfig.preset(args.size)
    room = Room(1, config.n_positions, args.threads)
    ways = {way: open_way(way, files, room) for way in names}
    bandwidth = Bandwidth(args.threads)
    rows: list[dict[str, Any]] = []
    spans = (QUICK_SPAN,) if args.quick else (BUSY_SPAN,) if args.busy else SPANS
    for length, n in spans:
        with busy(args.busy):
            seconds, read = measure(ways, bandwidth, length, n, args.rounds)
        streamed = streamed_bytes(config, precision, length + n / 2)
        fractions = [n * streamed / t / b for t, b in zip(seconds[me], read, strict=True)]
        rows.append({
            **facts(args),
            "class": name,
            "busy processes": args.busy,
            "positions": [length, length + n],
            "tokens/s": per_second(seconds, n),
            "ours is faster by (median of ratios)": faster_by(seconds, me),
            "read bandwidth, GB/s": round(statistics.median(read) / 1e9, 1),
            "MB a token streams, ours": round(streamed / 1e6, 1),
            LIMIT: round(statistics.median(fractions), 3),
        })  # fmt: skip
    ways.clear()
    memory: dict[str, int] = {}
    if not args.no_memory:
        counted = dict.fromkeys(way for row in rows for way in row["tokens/s"])
        memory = {way: peak_megabytes(way, files, room) for way in counted}
    for row in rows:
        row["peak MB of the process"] = {w: memory[w] for w in row["tokens/s"] if w in memory}
        keep("decode", row, args.quick)
        ratios = row["ours is faster by (median of ratios)"]
        first, last = row["positions"]
        show(
            f"{name}, positions {first} to {last}: ours at {row[LIMIT]:.0%} of the limit of "
            f"{row['read bandwidth, GB/s']} GB/s",
            {w: (rate, ratios.get(w), memory.get(w)) for w, rate in row["tokens/s"].items()},
            ("tokens/s", "ours faster by", "peak MB"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    add_choice(parser)
    add_class(parser)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    use_class(args)
    if args.quick:
        args.rounds = 1
    with files_of(args) as files:
        for name in args.classes:
            one_class(name, files, args)


if __name__ == "__main__":
    main()
