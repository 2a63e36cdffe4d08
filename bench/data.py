"""Time the preparation of a large text: `tiedgpt data prepare` against `datasets.map`.

    python bench/data.py [--megabytes 200] [--workers 1 2] [--letters 2000] [--tokenizer gpt2]

The text is .jsonl, made of shuffled sentences of Python's documentation. Both sides encode it with
the same tokenizer, from the command to the last byte on the disk: ours in token shards, `datasets`
in an Arrow file of its cache, with the same number of processes, and with one process and the
threads of `tokenizers`. Memory is the peak of the largest process (ru_maxrss), so this script
imports nothing large. CPU seconds are summed over all processes, and are more reliable than wall
time on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from turns import keep, processor, show, version

DATASETS = """
import sys
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer

text, tokenizer, cache, workers = sys.argv[1:]
rust = Tokenizer.from_file(tokenizer + "/tokenizer.json")
end = rust.token_to_id("<|endoftext|>")

def encode(rows):
    return {"ids": [each.ids + [end] for each in rust.encode_batch(rows["text"])]}

if __name__ == "__main__":
    data = load_dataset("json", data_files=text, split="train", cache_dir=cache)
    n = int(workers)
    data = data.map(encode, batched=True, remove_columns=["text"], num_proc=n if n > 1 else None)
    data.save_to_disk(cache + "/saved")
"""


@dataclass(frozen=True)
class Run:
    """The time and memory of a command."""

    wall: float
    processors: float
    megabytes: float


def run(command: list[str], **environment: str) -> Run:
    """Run a command; raise `SystemExit` with its output if it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{command}\n{said.read().decode()}")
    wall = time.perf_counter() - began
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def make(place: Path, megabytes: float, letters: int, tokenizer: str | None) -> None:
    """Write documents of about so many letters, and a tokenizer."""
    from tiedgpt import Tokenizer
    from tiedgpt.data import python_documentation

    text = "\n".join(document.text for document in python_documentation())
    sentences = [part for part in re.split(r"(?<=[.:])\s+", text) if 20 < len(part) < 400]
    chance, size = random.Random(0), 0
    with (place / "text.jsonl").open("w") as file:
        while size < megabytes * 1e6:
            parts: list[str] = []
            while sum(map(len, parts)) < letters:
                parts.append(chance.choice(sentences))
            size += file.write(json.dumps({"text": " ".join(parts)}) + "\n")
    made = Tokenizer.from_pretrained(tokenizer) if tokenizer else Tokenizer.train([text], 8192)
    made.save_pretrained(place / "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--letters", type=int, default=2000, help="of a document")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokenizer", help="a directory or hub name; else 8,192 are trained")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="without datasets")
    parser.add_argument("--quick", action="store_true", help="one round, and keep nothing")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    found: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        what = (place, args.megabytes, args.letters, args.tokenizer)
        maker = multiprocessing.get_context("spawn").Process(target=make, args=what)
        maker.start()
        maker.join()
        text = place / "text.jsonl"
        for _ in range(rounds):
            for n in args.workers:
                ours = [sys.executable, "-m", "tiedgpt", "data", "prepare", str(text)]
                ours += ["--out", str(place / "out"), "--workers", str(n)]
                ours += ["--tokenizer", str(place / "tokenizer")]
                found.setdefault(f"tiedgpt, {n} workers", []).append(run(ours))
                shutil.rmtree(place / "out")
                for threads in () if args.ours else ("true", "false") if n == 1 else ("false",):
                    theirs = [sys.executable, "-c", DATASETS, str(text), str(place / "tokenizer")]
                    theirs += [str(place / "cache"), str(n)]
                    name = "datasets, 1 with threads" if threads == "true" else f"datasets, {n}"
                    done = run(theirs, TOKENIZERS_PARALLELISM=threads)
                    found.setdefault(name, []).append(done)
                    shutil.rmtree(place / "cache")
    medians = {
        name: {
            key: round(statistics.median(asdict(each)[key] for each in runs), 1)
            for key in ("wall", "processors", "megabytes")
        }
        for name, runs in found.items()
    }
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("datasets", "tokenizers", "tiktoken")},
        "megabytes of text": args.megabytes,
        "letters of a document": args.letters,
        "tokenizer": Path(args.tokenizer).name if args.tokenizer else "8,192 of the text",
        "processes that wanted a core (load average of 15 minutes)": os.getloadavg()[2],
        "rounds": rounds,
        "seconds and peak MB of a process": medians,
    }
    keep("data", row, args.quick)
    cells = {
        name: (m["wall"], round(args.megabytes / m["wall"], 1), m["processors"], m["megabytes"])
        for name, m in medians.items()
    }
    show("medians", cells, ("seconds", "MB/s", "CPU seconds", "peak MB"))


if __name__ == "__main__":
    main()
