"""Tokens a second of 2, 8 and 32 sequences decoded together, ours against the peers.

    python bench/batch.py [--size gpt2] [--batch 2 8 32] [--ours "ours int8"] [--class avx2]

Everyone in turn: prompts of 64 ids are read, then as many tokens are decoded greedily in each;
tokens of all sequences are counted. Ratios are medians over rounds, against each of ours;
llama.cpp runs with and without flash attention, and the faster one counts.
"""

from __future__ import annotations

import argparse

from cpu_class import add_class, use_class
from formats import Files, add_options, files_of
from peers import open_way
from turns import better_flash, cores, facts, faster_by, in_turn, keep, per_second, prompts, show
from ways import Room, chosen

OURS = ("ours int8", "ours int4", "ours bf16")
PEERS = (
    "llama.cpp Q8_0", "llama.cpp Q8_0 flash", "llama.cpp Q4_0", "llama.cpp Q4_0 flash",
    "llama.cpp BF16", "llama.cpp BF16 flash",
    "ctranslate2 int8", "ctranslate2 float32", "transformers bf16",
)  # fmt: skip
PROMPT = 64


def one_size(batch: int, files: Files, args: argparse.Namespace) -> None:
    """Measure one number of sequences; keep and show it."""
    n = args.tokens
    room = Room(batch, PROMPT + n, args.threads)
    ways = {way: open_way(way, files, room) for way in (*args.ours, *chosen(PEERS, args.peers))}
    texts = prompts(batch, PROMPT)
    turns = {name: (lambda way=way: way(texts, n)[1]) for name, way in ways.items()}
    seconds = better_flash(in_turn(turns, args.rounds))
    ratios = {me: faster_by(seconds, me) for me in args.ours}
    row = {
        **facts(args),
        "sequences": batch,
        "positions": [PROMPT, PROMPT + n],
        "tokens/s": per_second(seconds, batch * n),
        **{f"{me} is faster by (median of ratios)": found for me, found in ratios.items()},
    }
    keep("batch", row, args.quick)
    show(
        f"{batch} sequences, positions {PROMPT} to {PROMPT + n}",
        {
            w: (rate, *(ratios[me].get(w) for me in args.ours))
            for w, rate in row["tokens/s"].items()
        },
        ("tokens/s", *(f"{me} faster" for me in args.ours)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    add_class(parser)
    parser.add_argument("--peers", nargs="+", help="only these, such as llama.cpp")
    parser.add_argument("--ours", nargs="+", choices=OURS, default=OURS)
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    use_class(args)
    if args.quick:
        args.rounds, args.tokens = 1, 4
    with files_of(args) as files:
        for batch in args.batch:
            one_size(batch, files, args)


if __name__ == "__main__":
    main()
