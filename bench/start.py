"""Measure seconds and peak memory from the start of a process to its first token.

    python bench/start.py [--size gpt2] [--rounds 7] [--class avx2]

Each engine is a fresh process that tokenizes a prompt and shows one token; the files are in the
disk's cache. "First token" is the time of its first byte of output, "end" that of its exit. Memory
is the kernel's count of the process's peak (ru_maxrss). A child starts with the size of this
script, which therefore imports nothing large.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from cpu_class import add_class, use_class
from formats import Files, add_options, files_of
from turns import cores, facts, faster_by, in_turn, keep, show

PROMPT = "The same matrix reads a token and predicts one:"
OURS = """
from tiedgpt.infer import Engine
engine = Engine({packed!r}, slots=1)
print(engine.generate({prompt!r}, max_new_tokens=1, temperature=0).ids)
"""
LLAMA = """
from llama_cpp import Llama
model = Llama({gguf!r}, n_threads={threads}, n_threads_batch={threads}, n_ctx=1024, verbose=False)
model.eval(model.tokenize({prompt!r}.encode(), add_bos=False))
print(model.sample(temp=0))
"""
CTRANSLATE2 = """
import ctranslate2, tokenizers
tokens = tokenizers.Tokenizer.from_file({tokenizer!r}).encode({prompt!r}).tokens
generator = ctranslate2.Generator({ct2!r}, compute_type="int8", intra_threads={threads})
print(generator.generate_batch([tokens], max_length=1, include_prompt_in_result=False))
"""
TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({hf!r})
encoded = AutoTokenizer.from_pretrained({hf!r})({prompt!r}, return_tensors="pt")
print(model.generate(**encoded, max_new_tokens=1, do_sample=False, pad_token_id=0))
"""


@dataclass(frozen=True)
class Run:
    """The time and memory of a process."""

    first: float
    """Seconds until its first byte."""
    end: float
    megabytes: float


def ran(command: list[str]) -> Run:
    """Run a command; raise `SystemExit` with its output if it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    first = time.perf_counter() - began
    process.stdout.read()
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    end = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{command}\n{said.decode()}")
    return Run(first, end, usage.ru_maxrss / 1024)


def commands(files: Files, threads: int) -> dict[str, list[str]]:
    """Return the command of each engine; write missing models first."""
    packed = str(files.packed("int8"))
    places = {
        "packed": packed, "gguf": str(files.gguf("q8_0")), "ct2": str(files.ctranslate2("int8")),
        "hf": str(files.hf), "tokenizer": str(files.hf / "tokenizer.json"),
        "prompt": PROMPT, "threads": threads,
    }  # fmt: skip
    scripts = {
        "ours int8, Python": OURS, "llama.cpp Q8_0, Python": LLAMA,
        "ctranslate2 int8, Python": CTRANSLATE2, "transformers fp32, Python": TRANSFORMERS,
    }  # fmt: skip
    generate = ["-m", "tiedgpt", "generate", packed, "--prompt", PROMPT]
    generate += ["--max-new-tokens", "1", "--temperature", "0"]
    return {"ours int8, command line": [sys.executable, *generate]} | {
        name: [sys.executable, "-c", script.format(**places)] for name, script in scripts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    add_class(parser)
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    use_class(args)
    if args.quick:
        args.rounds = 1
    with files_of(args) as files:
        starts = commands(files, args.threads)
        runs: dict[str, list[Run]] = {name: [] for name in starts}

        def turn(name: str) -> float:
            runs[name].append(ran(starts[name]))
            return runs[name][-1].first

        firsts = in_turn({name: (lambda name=name: turn(name)) for name in starts}, args.rounds)
    me = next(iter(starts))
    row = {
        **facts(args),
        "first token, s": {n: round(statistics.median(t), 3) for n, t in firsts.items()},
        "end, s": {n: round(statistics.median(r.end for r in rs[1:]), 3) for n, rs in runs.items()},
        "peak MB": {
            n: round(statistics.median(r.megabytes for r in rs[1:])) for n, rs in runs.items()
        },
        f"{me} is sooner by (median of ratios)": faster_by(firsts, me),
    }
    keep("start", row, args.quick)
    columns = list(row)[-4:]
    show(
        f"{args.size}: one token from a fresh process",
        {name: [row[column].get(name) for column in columns] for name in starts},
        ("first token, s", "end, s", "peak MB", "ours sooner by"),
    )


if __name__ == "__main__":
    main()
