"""Measure an engine's delays: during a long prompt, and after a cached prefix.

    python bench/delay.py [--size gpt2] [--precision int8] [--rounds 7]

Gaps: 7 sequences decode; each round submits a new prompt of 1,000 ids, and times every gap between
two tokens of a sequence until the prompt's first token. The result is the 99th percentile of these
gaps over the median gap before the prompt. Prefix: the times to the first token of a new prompt of
513 ids, and then of a prompt that differs in its last id.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from dataclasses import replace

import numpy as np

from formats import Files, add_options, files_of
from tiedgpt.infer import Engine, Generation
from turns import cores, facts, keep, show

DECODING, LONG, PREFIX = 7, 1000, 512
PLAIN = 40
"""Tokens before the long prompt."""


def ids(n: int, number: int) -> list[int]:
    """Return n ids, others for each number."""
    return [(7919 * at + 101 * number + 1) % 50_000 for at in range(n)]


def stamped(generation: Generation, stamps: list[float]) -> None:
    """Note when each token comes."""
    for _ in generation:
        stamps.append(time.perf_counter())


def gaps(engine: Engine, number: int) -> tuple[list[float], list[float]]:
    """Return the gaps between tokens before a long prompt comes, and while it is read."""
    options = {"max_new_tokens": 900, "temperature": 0}
    running = [engine.stream(ids(16, 100 + slot), **options) for slot in range(DECODING)]
    stamps: list[list[float]] = [[] for _ in running]
    readers = [
        threading.Thread(target=stamped, args=pair) for pair in zip(running, stamps, strict=True)
    ]
    for reader in readers:
        reader.start()
    while min(map(len, stamps)) < PLAIN:
        time.sleep(0.001)
    came = time.perf_counter()
    engine.generate(ids(LONG, number), max_new_tokens=1)
    read = time.perf_counter()
    for generation, reader in zip(running, readers, strict=True):
        generation.cancel()
        reader.join()
    before, beside = list[float](), list[float]()
    for times in stamps:
        for a, b in itertools.pairwise(times[8:]):
            if b <= came:
                before.append(b - a)
            elif b <= read:
                beside.append(b - a)
    return before, beside


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Return the seconds until a prompt's first token."""
    began = time.perf_counter()
    engine.generate(prompt, max_new_tokens=1, temperature=0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--precision", default="int8", choices=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    with files_of(args) as files:
        measure(files, args, rounds)


def measure(files: Files, args: argparse.Namespace, rounds: int) -> None:
    """Measure both delays; keep and show them."""
    engine = Engine(files.packed(args.precision), slots=DECODING + 1, threads=args.threads)
    engine.runner.config = replace(engine.runner.config, eos_token_id=None)
    before, beside = list[float](), list[float]()
    cold, known = list[float](), list[float]()
    for number in range(rounds + 1):
        plain, mixed = gaps(engine, number)
        prefix = ids(PREFIX, 50 + number)
        first, again = (first_token(engine, [*prefix, last]) for last in (1, 2))
        if number:
            before, beside = before + plain, beside + mixed
            cold, known = [*cold, first], [*known, again]
    step, late = statistics.median(before), float(np.percentile(beside, 99))
    row = {
        **facts(args),
        "precision": args.precision,
        "median step of 7 sequences, ms": round(1e3 * step, 2),
        "99th percentile of gaps beside 1,000 new ids, ms": round(1e3 * late, 2),
        "longest gap, ms": round(1e3 * max(beside), 2),
        "99th percentile in steps": round(late / step, 2),
        "first token after 512 new ids, ms": round(1e3 * statistics.median(cold), 1),
        "after 512 known ids, ms": round(1e3 * statistics.median(known), 1),
        "known over new (median of ratios)": round(
            statistics.median(b / a for a, b in zip(cold, known, strict=True)), 3
        ),
    }
    keep("delay", row, args.quick)
    told = list(row.items())[list(row).index("precision") :]
    show("delays", {name: (value,) for name, value in told}, ("",))


if __name__ == "__main__":
    main()
