"""Two checkouts in turn, to see whether a change costs speed.

    git worktree add ../old COMMIT
    python bench/commits.py ../old [--only load train recipe start generate serve] [--rounds 9]

A checkout has a process for each group of works, which is started anew three times, because a
process may be 1.5 times as slow as the next. A round asks both checkouts for the same work, in
alternating order. "recipe" runs `tiedgpt train` itself, a process each time, and "start" until
its first step. The ratio is the
median over rounds of old seconds over new seconds: above 1 the new checkout is faster. Weights are
random, text is the standard library's source.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from pathlib import Path

NEW = Path(__file__).parents[1]
CHARACTERS = 1_500_000
PROCESSES = 3
"""Number of times that a group's processes are started."""
GPT2 = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
SMALL = {"vocab_size": 2048, "n_layer": 6, "n_head": 8, "n_embd": 256, "n_positions": 128}
MODELS = {"5M": SMALL, "gpt2": GPT2}
SHAPES = {"5M, 16 x 128": (SMALL, 16), "124M, 4 x 512": (GPT2 | {"n_positions": 512}, 4)}
RECIPES = (("tiny", "bf16", 150), ("little", "bf16", 80), ("mini", "bf16", 45),
           ("tiny", "fp32", 120), ("little", "fp32", 60), ("mini", "fp32", 30))  # fmt: skip
GREEDY, TOP_P = {"temperature": 0.0}, {"top_p": 0.9, "seed": 1}
Work = Callable[[], object]


def load_works(models: Path) -> dict[str, Work]:
    """Return works that load models."""
    from tiedgpt import GPT

    return {f"load {name}": lambda name=name: GPT.from_pretrained(models / name) for name in MODELS}


def train_works(models: Path) -> dict[str, Work]:
    """Return steps of AdamW, plain and fast."""
    import torch

    from tiedgpt import GPT, GPTConfig
    from tiedgpt.train import fast_training

    works: dict[str, Work] = {}
    no_dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    for name, (shape, rows) in SHAPES.items():
        config = GPTConfig(**shape, **no_dropout)
        model = GPT(config).train()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, config.vocab_size, (rows, config.n_positions + 1))
        for dtype in ("fp32", "bf16"):

            def step(model=model, adamw=adamw, ids=ids, dtype=dtype, fast=True) -> None:
                with fast_training(model) if fast else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                        loss = model.loss(ids[:, :-1], ids[:, 1:])
                    adamw.zero_grad()
                    loss.backward()
                    adamw.step()

            works[f"step {name} {dtype}"] = step
            if rows > 4:
                works[f"step {name} {dtype} plain"] = lambda step=step: step(fast=False)
    return works


def generate_works(models: Path) -> dict[str, Work]:
    """Return 48 tokens of one and of eight sequences, and a prompt of 512."""
    from tiedgpt.infer import Engine
    from turns import prompts

    works: dict[str, Work] = {}
    for precision in ("int8", "int4", "bf16", "fp32"):
        generate = Engine(models / "gpt2", precision=precision).generate
        for name, n, options in (("1", 1, GREEDY), ("8", 8, GREEDY), ("8 top_p", 8, TOP_P)):
            works[f"{precision} {name}"] = lambda generate=generate, n=n, options=options: generate(
                prompts(n, 32), max_new_tokens=48, **options
            )
        numbers = count(1)  # no prompt comes twice: its keys and values would be kept
        works[f"{precision} prompt of 512"] = lambda generate=generate, numbers=numbers: generate(
            prompts(next(numbers), 512)[-1:], max_new_tokens=1
        )
    return works


def serve_works(models: Path) -> dict[str, Work]:
    """Return requests to the application, which is called without a socket."""
    from starlette.testclient import TestClient

    from tiedgpt.infer import Engine
    from tiedgpt.serve.app import create_app

    app = create_app(Engine(models / "5M", precision="int8", slots=8), name="5M")
    clients = [TestClient(app, base_url="http://127.0.0.1") for _ in range(8)]

    def ask(client: TestClient, max_tokens: int, *, stream: bool = True) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": stream, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200

    def ask_eight_times() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda client: ask(client, 64), clients))

    return {
        "20 streams of 1 token": lambda: [ask(clients[0], 1) for _ in range(20)],
        "20 answers of 1 token": lambda: [ask(clients[0], 1, stream=False) for _ in range(20)],
        "a stream of 120 tokens": lambda: ask(clients[0], 120),
        "8 streams of 64 tokens": ask_eight_times,
    }


GROUPS = {
    "load": load_works, "train": train_works, "generate": generate_works, "serve": serve_works,
}  # fmt: skip


def serve(group: str, models: Path) -> None:
    """Do the works of a group that are asked for on standard input; print their seconds."""
    works = GROUPS[group](models)
    print(json.dumps(list(works)), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        works[line.strip()]()
        print(time.perf_counter() - began, flush=True)


class Checkout:
    """A checkout whose works are done in one process."""

    def __init__(self, tree: Path, group: str, models: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", group, str(models)],
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.names: list[str] = json.loads(self.process.stdout.readline())

    def seconds(self, name: str) -> float:
        """Do a work; return its seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def seconds_a_token(tree: Path, recipe: tuple[str, str, int], text: Path, out: Path) -> float:
    """Train by the command line; return the median seconds a token after three steps."""
    size, dtype, steps = recipe
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "tiedgpt", "train", text, "--out", out, "--size", size,
         "--dtype", dtype, "--steps", str(steps)],
        env=os.environ | {"PYTHONPATH": str(tree / "src")}, check=True, capture_output=True,
    )  # fmt: skip
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return 1 / statistics.median(rates[3:])


def seconds_to_first_step(tree: Path, text: Path, out: Path) -> float:
    """Return the seconds from the start of `tiedgpt train --minutes 0.25` to its first step."""
    shutil.rmtree(out, ignore_errors=True)
    began, metrics = time.perf_counter(), out / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "tiedgpt", "train", text, "--out", out, "--minutes", "0.25"],
        env=os.environ | {"PYTHONPATH": str(tree / "src")}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    return seconds


def in_pairs(
    rounds: int, old: Callable[[], float], new: Callable[[], float]
) -> list[tuple[float, float]]:
    """Call both in turn; return their results."""
    pairs = []
    for number in range(rounds):
        first, second = (old, new) if number % 2 else (new, old)
        pair = first(), second()
        pairs.append(pair if number % 2 else pair[::-1])
    return pairs


def show(name: str, pairs: list[tuple[float, float]]) -> None:
    """Print the medians and the ratio with its quartiles."""
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    print(
        f"{name:28} old {before:.4g} s  new {after:.4g} s  old/new {middle:.3f} "
        f"[{low:.3f}, {high:.3f}]",
        flush=True,
    )


def compare_group(group: str, models: Path, old_tree: Path, rounds: int) -> None:
    """Compare the works of a group, and print them."""
    results: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(PROCESSES):
        old, new = (Checkout(tree, group, models) for tree in (old_tree, NEW))
        for name in new.names:
            old.seconds(name), new.seconds(name)
            turns = (lambda name=name, it=it: it.seconds(name) for it in (old, new))
            results[name] += in_pairs(-(-rounds // PROCESSES), *turns)
        for checkout in (old, new):
            checkout.process.kill()
            checkout.process.wait()
    for name, pairs in results.items():
        show(name, pairs)


def main() -> None:
    """Compare."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="another checkout of this repository")
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, "recipe", "start"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    only = args.only or [*GROUPS, "recipe", "start"]
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for group in (group for group in GROUPS if group in only):
            compare_group(group, Path(folder), args.old, args.rounds)
        for recipe in RECIPES if "recipe" in only else ():
            old, new = (
                lambda tree=tree, recipe=recipe: seconds_a_token(
                    tree, recipe, Path(folder, "text.txt"), Path(folder, "run")
                )
                for tree in (args.old, NEW)
            )
            pairs = in_pairs(max(2, args.rounds // 3), old, new)
            show("recipe {} {}, a token".format(*recipe), pairs)
        if "start" in only:
            old, new = (
                lambda tree=tree: seconds_to_first_step(
                    tree, Path(folder, "text.txt"), Path(folder, "run")
                )
                for tree in (args.old, NEW)
            )
            show("train, to the first step", in_pairs(args.rounds, old, new))


def make_models(folder: Path) -> None:
    """Save the models with random weights, and the text."""
    from tiedgpt import GPT, GPTConfig

    for name, shape in MODELS.items():
        GPT(GPTConfig(**shape)).save_pretrained(folder / name)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    (folder / "text.txt").write_text(text[:CHARACTERS], encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
