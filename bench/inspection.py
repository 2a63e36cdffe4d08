"""Measure the inspections: seconds of a call, and peak memory of a process with that call.

    python bench/inspection.py [--size gpt2] [--rounds 3]

Each is a fresh process that reads the fp32 model, calls one function, and prints the seconds of
that call. "body" is the model's own pass over the same 1,024 tokens, without logits: `positions`
adds to its memory the logits of 64 positions, not the 206 MB of all. "table" prints a row for each
token of the vocabulary, as `tiedgpt inspect vocabulary --top` does, to a pipe.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from formats import add_options, files_of
from turns import cores, facts, in_turn, keep, show

OPEN = """
import contextlib, io, sys, time
import numpy as np
import torch
from tiedgpt import GPT, Tokenizer, inspect
torch.set_num_threads({threads})
model, tokenizer = GPT.from_pretrained({hf!r}).eval(), Tokenizer.from_pretrained({hf!r})
size = model.config.vocab_size
counts = np.random.default_rng(0).zipf(1.3, size) % 1_000_000
ids = torch.arange(1024) * 7919 % size
"""
CLOSE = """
took = time.perf_counter() - began
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
print(took, peak)
"""
BEGIN = "began = time.perf_counter()\n"
CALLS = {
    "vocabulary": BEGIN + "inspect.vocabulary(model, tokenizer, counts=counts)",
    "table": "found = inspect.vocabulary(model, tokenizer, counts=counts)\n"
    + BEGIN
    + "found.table(size)",
    "body": BEGIN + "with torch.no_grad(): model.body(ids[None])",
    "positions": BEGIN + "inspect.positions(model, tokenizer, ids)",
    "dot": BEGIN + "inspect.dot(model, tokenizer, ids)",
    "lens, 256 tokens": BEGIN + "inspect.lens(model, tokenizer, ids[:256])",
    "attention, 256 tokens": BEGIN + "inspect.attention(model, tokenizer, ids[:256])",
    "gradient_split": BEGIN + "inspect.gradient_split(model, tokenizer, ids)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(rounds=3)
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    peaks: dict[str, list[float]] = {name: [] for name in CALLS}

    def turn(name: str, hf: Path) -> float:
        script = OPEN.format(threads=args.threads, hf=str(hf)) + CALLS[name] + CLOSE
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{name}\n{ran.stderr}")
        seconds, peak = map(float, ran.stdout.split())
        peaks[name].append(peak)
        return seconds

    with files_of(args) as files:
        ways = {name: (lambda name=name: turn(name, files.hf)) for name in CALLS}
        seconds = in_turn(ways, args.rounds)
    row = {
        **facts(args),
        "s": {name: round(statistics.median(each), 2) for name, each in seconds.items()},
        "peak MB": {name: round(max(each)) for name, each in peaks.items()},
    }
    keep("inspection", row, args.quick)
    cells = {name: (row["s"][name], row["peak MB"][name]) for name in CALLS}
    show(f"{args.size}, fp32", cells, ("s", "peak MB"))


if __name__ == "__main__":
    main()
