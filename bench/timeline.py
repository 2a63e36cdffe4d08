"""The time of a decoding step by phase and by thread, of one sequence.

    python bench/timeline.py [--size gpt2] [--classes int8 4-bit] [--position 64]

Runs a temporary copy of `src` whose kernel also writes when a thread begins a phase, has done its
chunks, and sees that all are done. Prints for each phase its milliseconds in a step (the sum of the
layers, the median of the steps), the part of them in which a thread has no chunk (the mean of the
threads), and the weights that it reads a second, beside the bandwidth of `bandwidth.py` in the same
run. "between" is the time of a step outside its kernel.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
CLOCK = '''
@instructions(types.int64)
def ticks(builder):
    """Return the CPU's cycle counter."""
    return call(builder, "llvm.readcyclecounter", ir.IntType(64), [])


@jit
def claim_chunks('''
WRITE = """    barrier(control, phase, done, chunks)
    at = _line(control, phase) + (1 + control.me) * LINE
    control.counters[at + 1] = began
    control.counters[at + 2] = worked
    control.counters[at + 3] = ticks()
"""
STEP = "        step(0)\n        self._unfinished = None\n\n    def finish"
CHANGES = {
    "work_stealing.py": {
        "\n@jit\ndef claim_chunks(": CLOCK,
        "    done = 0\n    while True:": "    done, began = 0, ticks()\n    while True:",
        "    barrier(control, phase, done, chunks)\n": "    worked = ticks()\n" + WRITE,
    },
    "thread_pool.py": {
        STEP: "        taken.append(step)\n" + STEP,
        "\nBEHIND = ": "\ntaken = []\nBEHIND = ",
    },
}
"""Replacements in the files of the copy."""
STEPS = 128
"""Steps of a round."""
LAYER = ("norm", "c_attn", "attention", "quantize", "attn_proj", "norm", "c_fc", "mlp_proj")
"""The phases of a layer, in order."""


def copy_source(to: Path) -> None:
    """Copy the package to a directory, with a clock in its kernels."""
    shutil.copytree(ROOT / "src", to, ignore=shutil.ignore_patterns("__pycache__", "machine_code"))
    for name, changes in CHANGES.items():
        path = to / "tiedgpt/infer/kernels" / name
        text = path.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text)


def table(
    counters: NDArray[np.int64], names: list[str], seconds: float
) -> dict[str, tuple[float, float]]:
    """Return for each phase its seconds in a step, and the part in which a thread has no chunk.

    `counters` (1 + steps, phases, 1 + threads, 8) begin with the prompt's step; `seconds` is the
    time of the others.
    """
    began, worked, ended = (counters[:, :, 1:, word].astype(float) for word in (1, 2, 3))
    last = np.where(ended > 0, ended, np.inf).min(axis=2)
    tick = seconds / (last[-1, -1] - last[0, -1])
    first = np.concatenate([began[:, :1].min(axis=2), last[:, :-1]], axis=1)
    took = last - first
    works = np.minimum(worked, last[..., None]) - np.maximum(began, first[..., None])
    idle = took - works.clip(min=0).mean(axis=2)
    times = {}
    for name in dict.fromkeys(names):
        columns = [at for at, other in enumerate(names) if other == name]
        sums = took[1:, columns].sum(axis=1)
        share = float(np.median(idle[1:, columns].sum(axis=1) / sums))
        times[name] = float(np.median(sums)) * tick, share
    times["between"] = float(np.median(first[1:, 0] - last[:-1, -1])) * tick, 1.0
    return times


def show(
    rounds: list[dict[str, tuple[float, float]]], weights: dict[str, int], step: float, peak: float
) -> None:
    """Print the medians of the rounds' tables, of steps that took `step` seconds."""
    for name in rounds[0]:
        took, idle = (statistics.median(times[name][i] for times in rounds) for i in (0, 1))
        line = f"  {name:10}{took * 1e3:7.3f} ms{took / step:6.1%}  idle {idle:4.0%}"
        if name in weights:
            speed = weights[name] / took
            line += f"{speed / 1e9:7.1f} GB/s, {speed / peak:.0%}"
        print(line)


def main() -> None:
    """Measure."""
    from bandwidth import Bandwidth
    from formats import add_options, files_of
    from tiedgpt import GPTConfig
    from tiedgpt.infer.kernels import thread_pool
    from tiedgpt.infer.kernels.arguments import LINE
    from tiedgpt.weights.formats.packed import layout
    from ways import CLASSES, Room, ours

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=["int8", "4-bit"])
    parser.add_argument("--position", type=int, default=64, help="length of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    config = GPTConfig.preset(args.size)
    names = ["embed", *LAYER * config.n_layer, "norm", "head"]
    shape = (1 + STEPS, len(names), 1 + args.threads, LINE)
    prompt = [list(range(1, args.position + 1))]
    bandwidth, taken = Bandwidth(args.threads), thread_pool.taken  # type: ignore[attr-defined]
    for name in args.classes:
        precision = CLASSES[name][0]
        weights: dict[str, int] = defaultdict(int)
        for array, (size, dtype) in layout(config, precision).items():
            if array.endswith((".weights", ".scales")):
                matrix = array.split(".")[0].replace("wte", "head")
                weights[matrix] += math.prod(size) * np.dtype(dtype).itemsize
        with files_of(args) as files:
            generate = ours(files, Room(1, config.n_positions, args.threads), precision)
        peaks, seconds, rounds = [], [], []
        for _ in range(args.rounds):
            peaks.append(bandwidth())
            taken.clear()
            seconds.append(generate(prompt, STEPS)[1])
            counters = np.stack([step.counters[LINE:] for step in taken]).reshape(shape)
            rounds.append(table(counters, names, seconds[-1]))
        peak, step = statistics.median(peaks), statistics.median(seconds) / STEPS
        print(f"{name}, {step * 1e3:.2f} ms a token; bandwidth {peak / 1e9:.1f} GB/s")
        show(rounds, weights, step, peak)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        copy_source(Path(directory, "src"))
        sys.path.insert(0, str(Path(directory, "src")))
        main()
