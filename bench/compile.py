"""Measure how long kernels take to be compiled: by precision, phase and function.

    python bench/compile.py [--precisions int8 int4 bf16 fp32] [--functions 8] [--rounds 3]

Each precision has a process with an empty cache that compiles forward and sampling for a tiny
model. "wall" and "CPU" are seconds of the first token, as users see them; the phases are
CPU seconds of compiling in one process. Other work on the machine changes them: look at ratios.
At the end, the seconds of a first training step, which compiles six kernels, in several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from turns import show

PHASES = ("typing, lowering", "LLVM by function", "LLVM, kernel")
"""The first two are Numba's."""


def first_token(precision: str) -> dict[str, float]:
    """Return the seconds until a tiny model predicts its first token."""
    import torch

    from tiedgpt import GPT, GPTConfig
    from tiedgpt.infer import Engine

    torch.manual_seed(0)
    config = GPTConfig(vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    engine = Engine(GPT(config), precision, backend="kernels", threads=1)
    began, began_cpu = time.perf_counter(), cpu_seconds()
    completion = engine.generate([[1, 2, 3]], max_new_tokens=1)[0]
    assert completion.error is None, completion.error
    return {
        "seconds": time.perf_counter() - began, "CPU seconds": cpu_seconds() - began_cpu,
    }  # fmt: skip


def first_step(_: str) -> float:
    """Return the seconds of the first training step of a small model in fp32, with dropout."""
    import torch

    from tiedgpt import GPT, GPTConfig
    from tiedgpt.train import fast_training

    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=512, n_positions=128, n_embd=256, n_layer=4, n_head=8, attn_pdrop=0.0
    )
    model, ids = GPT(config).train(), torch.randint(512, (8, 129))
    began = time.perf_counter()
    with fast_training(model):
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
    return time.perf_counter() - began


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def phases(precision: str) -> dict[str, Any]:
    """Compile in this process; return the CPU seconds of phases and of functions."""
    from numba.core import event

    seconds: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    open_events: list[list[float]] = []

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            open_events.append([time.process_time(), 0.0])

        def on_end(self, event: Any) -> None:
            began, inner = open_events.pop()
            duration = time.process_time() - began
            if open_events:
                open_events[-1][1] += duration
            if event.kind == "numba:llvm_lock":
                seconds[PHASES[1 if open_events else 2]] += duration - inner
            else:
                seconds[PHASES[0]] += duration - inner
                name = str(event.data["name"]).partition("[")[2].rstrip("]")
                functions[name.rpartition(".")[2]] += duration - inner

    for name in ("numba:run_pass", "numba:llvm_lock"):
        event.register(name, Listener())

    sys.executable = ""  # no process can be started: this one compiles
    first_token(precision)
    return {"phases": seconds, "functions": functions}


def run(work: str, precision: str) -> Any:
    """Return the result of a function of this script in a process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        settings = os.environ | {"NUMBA_CACHE_DIR": cache, "NUMBA_OPT": "0"}
        command = [sys.executable, __file__, "--work", work, "--precisions", precision]
        ran = subprocess.run(command, env=settings, check=True, stdout=subprocess.PIPE)
        return json.loads(ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="+", default=["int8", "int4", "bf16", "fp32"])
    parser.add_argument("--functions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    works = "first_token", "phases", "first_step"
    parser.add_argument("--work", choices=works, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(globals()[args.work](args.precisions[0])))
        return
    rows, functions = {}, {}
    for precision in args.precisions:
        total, details = run("first_token", precision), run("phases", precision)
        numbers = {**total, **{phase: details["phases"].get(phase, 0.0) for phase in PHASES}}
        rows[precision] = [f"{value:.2f}" for value in numbers.values()]
        functions[precision] = Counter(details["functions"]).most_common(args.functions)
    show("first token with an empty cache", rows, ("wall", "CPU", *PHASES))
    for precision, costs in functions.items():
        print(precision, ", ".join(f"{name} {value:.2f}" for name, value in costs))
    seconds = sorted(run("first_step", "fp32") for _ in range(args.rounds))
    print("first training step", ", ".join(f"{x:.2f}" for x in seconds))


if __name__ == "__main__":
    main()
