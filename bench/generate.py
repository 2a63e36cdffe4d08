"""Compare `Engine.generate` with the bare speed of the kernels, `Session.read`.

    python bench/generate.py [--size gpt2] [--precision int8] [--batch 1 8 32] [--class avx2]

All engines take turns: each reads new prompts of 64 ids and generates as many tokens for each; the
time covers both. "bare" reads and takes the largest logit by numpy; the others are
`Engine.generate`, greedy and with top_p=0.95 on the flat logits of random weights; llama.cpp is
llama-cpp-python's own `generate`, one sequence at a time; transformers' is its `generate` in bf16.
Shares are medians over rounds of the bare rate's time over the other's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from cpu_class import add_class, use_class
from formats import Files, add_options, files_of
from peers import open_way
from turns import busy, cores, facts, faster_by, in_turn, keep, per_second, show
from ways import Prompts, Room

PROMPT = 64
OPTIONS = {
    "greedy": {"temperature": 0},
    "top_k 40, top_p 0.95": {"top_k": 40, "top_p": 0.95, "seed": 1},
    "top_p 0.95": {"top_p": 0.95, "seed": 1},
}
Run = Callable[[Prompts, int], object]


def engine(files: Files, room: Room, precision: str) -> dict[str, Run]:
    """Return `Engine.generate` with different options; no way stops at an end of text."""
    from tiedgpt.infer import Engine

    ours = Engine(files.packed(precision), slots=room.slots, threads=room.threads)
    ours.runner.config = replace(ours.runner.config, eos_token_id=None)

    def run(options: dict[str, object]) -> Run:
        return lambda prompts, n: ours.generate(prompts, max_new_tokens=n + 1, **options)

    return {f"generate {name}": run(options) for name, options in OPTIONS.items()}


def llama(files: Files, room: Room, precision: str) -> Run:
    """llama-cpp-python's `Llama.generate`."""
    import llama_cpp

    path = str(files.gguf({"int8": "q8_0", "int4": "q4_0"}.get(precision, precision)))
    theirs = llama_cpp.Llama(
        path, n_ctx=room.capacity, n_threads=room.threads, n_threads_batch=room.threads,
        verbose=False,
    )  # fmt: skip

    def run(prompts: Prompts, n: int) -> None:
        for prompt in prompts:
            theirs.reset()
            for _ in itertools.islice(theirs.generate(prompt, temp=0.0), n + 1):
                pass

    return run


def one_batch(batch: int, files: Files, args: argparse.Namespace) -> None:
    """Measure one number of sequences; keep and show it."""
    n, room = args.tokens, Room(batch, PROMPT + args.tokens + 1, args.threads)
    ways: dict[str, Run] = {"bare": open_way(f"ours {args.precision}", files, room)}
    ways |= engine(files, room, args.precision)
    if batch == 1 and "llama.cpp" in args.peers:
        ways["llama.cpp generate"] = llama(files, room, args.precision)
    if batch == 8 and "transformers" in args.peers:
        ways["transformers bf16 generate"] = open_way("transformers bf16", files, room)
    numbers = itertools.count()

    def timed(way: Run) -> float:
        number = next(numbers)  # other prompts in each turn: no prefix is reused
        prompts = [
            [(31 * slot + 7919 * at + 101 * number + 1) % 50_000 for at in range(PROMPT)]
            for slot in range(batch)
        ]
        began = time.perf_counter()
        way(prompts, n)
        return time.perf_counter() - began

    turns = {name: (lambda way=way: timed(way)) for name, way in ways.items()}
    with busy(args.busy):
        seconds = in_turn(turns, args.rounds)
    shares = {name: round(1 / ratio, 3) for name, ratio in faster_by(seconds, "bare").items()}
    row = {
        **facts(args),
        "precision": args.precision,
        "busy processes": args.busy,
        "sequences": batch,
        "tokens": n + 1,
        "tokens/s": per_second(seconds, batch * (n + 1)),
        "share of the bare rate (median of ratios)": shares,
    }
    keep("generate", row, args.quick)
    cells = {way: (rate, shares.get(way)) for way, rate in row["tokens/s"].items()}
    show(f"{batch} sequences, {args.precision}", cells, ("tokens/s", "share of bare"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    add_class(parser)
    parser.add_argument("--precision", default="int8", choices=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--peers", nargs="*", default=["llama.cpp", "transformers"])
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    args = parser.parse_args()
    use_class(args)
    if args.quick:
        args.rounds, args.tokens = 1, 4
    with files_of(args) as files:
        for batch in args.batch:
            one_batch(batch, files, args)


if __name__ == "__main__":
    main()
