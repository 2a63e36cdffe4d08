"""Seconds to read a prompt of 512 tokens, ours against the peers; only the last is predicted from.

    python bench/prefill.py [--size gpt2] [--tokens 512] [--classes int8] [--class avx2]

Class by class, everyone in turn; ratios are medians over rounds; llama.cpp runs with and without
flash attention, and the faster one counts. onnxruntime's graph gives the logits of all positions,
as its convention is.
"""

from __future__ import annotations

import argparse
import statistics

from cpu_class import add_class, use_class
from formats import Files, add_options, files_of
from peers import open_way
from turns import better_flash, cores, facts, faster_by, in_turn, keep, per_second, prompts, show
from ways import Room, add_choice, names_of


def one_class(name: str, files: Files, args: argparse.Namespace) -> None:
    """Measure a class; keep and show it."""
    me, *_ = names = names_of(name, args)
    room = Room(1, args.tokens, args.threads)
    ways = {way: open_way(way, files, room) for way in names}
    prompt = prompts(1, args.tokens)
    turns = {name: (lambda way=way: way(prompt, 0)[0]) for name, way in ways.items()}
    seconds = better_flash(in_turn(turns, args.rounds))
    row = {
        **facts(args),
        "class": name,
        "tokens": args.tokens,
        "seconds": {way: round(statistics.median(t), 4) for way, t in seconds.items()},
        "tokens/s": per_second(seconds, args.tokens),
        "ours is faster by (median of ratios)": faster_by(seconds, me),
    }
    keep("prefill", row, args.quick)
    rates, ratios = row["tokens/s"], row["ours is faster by (median of ratios)"]
    show(
        f"{name}, {args.tokens} tokens",
        {w: (s, rates[w], ratios.get(w)) for w, s in row["seconds"].items()},
        ("seconds", "tokens/s", "ours faster by"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    add_choice(parser)
    add_class(parser)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    use_class(args)
    if args.quick:
        args.rounds, args.tokens = 1, 32
    with files_of(args) as files:
        for name in args.classes:
            one_class(name, files, args)


if __name__ == "__main__":
    main()
