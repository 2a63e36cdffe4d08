"""Train the same runs with two checkouts, and compare their outputs bit for bit.

    python bench/same_runs.py ../old [--only words] [--resume]

A run of `RUNS` takes a dozen steps. The outputs are the lines of
metrics.jsonl without times, the tables of run.toml without the machine, the published model, the
tokenizer, and the last checkpoint's tensors. The text of `--help` is compared, too. With
`--resume`, the old checkout begins each run and is killed after a few steps. The new one ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

NEW = Path(__file__).parents[1]
STEPS = 12
KILL_AFTER_LINES = 6
TIMES = ("tokens_per_second", "examples_per_second", "machine_")
"""Beginnings of the keys of metrics.jsonl that measure the machine."""
TRAIN = ["train", "text.txt", "--size", "nano", "--steps", str(STEPS)]
TUNE = ["--from", "base", "--steps", str(STEPS), "--batch-size", "3"]
RUNS = {
    "words": TRAIN,
    "characters": [*TRAIN, "--tokenizer", "char", "--dtype", "fp32"],
    "dropout": [*TRAIN, "--dropout", "0.1", "--optimizer", "adamw", "--micro-batch", "5"],
    "recomputed": [*TRAIN, "--recompute", "blocks", "--schedule", "wsd", "--no-bias"],
    "auto": ["train", "text.txt", "--steps", "3"],
    "started": ["train", "text.txt", "--start", "base", "--steps", str(STEPS), "--freeze", "wte"],
    "chat": ["tune", "chats.jsonl", *TUNE],
    "chat unpacked": ["tune", "chats.jsonl", *TUNE, "--packing", "off", "--template", "plain"],
    "completions": ["tune", "completions.jsonl", *TUNE, "--dtype", "fp32"],
    "text": ["tune", "text.txt", *TUNE],
    "lora": ["tune", "chats.jsonl", *TUNE, "--lora", "3"],
    "classify": ["train", "labels.jsonl", "--task", "classify", "--size", "nano", "--steps", "12"],
    "choose": ["train", "choices.jsonl", "--task", "choose", "--size", "nano", "--steps", "12"],
}


def main() -> None:
    """Compare, and end with 1 for a difference."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="another checkout of this repository")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--resume", action="store_true", help="end the old checkout's runs")
    args = parser.parse_args()
    old, n_different = args.old.resolve(), 0
    if not (old / "src/tiedgpt").is_dir():
        parser.error(f"{old} is no checkout of tiedgpt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        run(old, ["train", "text.txt", "--size", "nano", "--steps", "4", "--out", "base"], folder)
        for name in args.only:
            command = RUNS[name]
            run(old, [*command, "--out", "old"], folder)
            if args.resume:
                run_until_killed(old, [*command, "--out", "new"], folder)
            run(NEW, [*command, "--out", "new"], folder)
            differences = compare(result_of(folder / "old"), result_of(folder / "new"))
            n_different += bool(differences)
            print(f"{name:14} {'; '.join(differences) or 'equal'}", flush=True)
            for side in ("old", "new"):
                (folder / side).rename(folder / f"{side} {name}")
        for verb in ("train", "tune"):
            texts = [run(tree, [verb, "--help"], folder) for tree in (old, NEW)]
            n_different += texts[0] != texts[1]
            print(f"{verb} --help".ljust(14), "equal" if texts[0] == texts[1] else "differs")
    sys.exit(n_different > 0)


def make_data(folder: Path) -> None:
    """Write a text, chats, completions, labels and choices."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    (folder / "text.txt").write_text(text[:60_000], encoding="utf-8")
    words = ["red", "green", "blue", "black", "white", "grey", "brown"]
    records: dict[str, list[dict[str, Any]]] = {
        "chats": [], "completions": [], "labels": [], "choices": [],
    }  # fmt: skip
    for number in range(60):
        word, other = words[number % 7], words[number * 3 % 5]
        turns = [("user", f"{word} {number}?"), ("assistant", f"{other} and {word}.")] * 2
        messages = [{"role": role, "content": content} for role, content in turns]
        records["chats"].append({"messages": messages})
        records["completions"].append({"prompt": f"{word} {number}:", "completion": f" {other}"})
        records["labels"].append({"text": f"{word} {other} {number}", "label": word})
        choices = [other, word, "none"]
        records["choices"].append({"text": f"{number} {word}", "choices": choices, "answer": 1})
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def start(tree: Path, command: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command of a checkout."""
    return subprocess.Popen(
        [sys.executable, "-m", "tiedgpt", *command], cwd=folder, text=True,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "COLUMNS": "80"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(tree: Path, command: list[str], folder: Path) -> str:
    """Run a command to its end; return its output."""
    process = start(tree, command, folder)
    output, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{tree}: {' '.join(command)} ended with {process.returncode}\n{errors}")
    return output


def run_until_killed(tree: Path, command: list[str], folder: Path) -> None:
    """Run a training until its metrics have some lines, and kill it."""
    process, metrics = start(tree, command, folder), folder / command[-1] / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= KILL_AFTER_LINES:
            process.kill()
        time.sleep(0.002)
    process.communicate()


def result_of(run: Path) -> dict[str, object]:
    """Return the output of a run by name: metrics, options, plan, digests of files."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    metrics = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]
    record = tomllib.loads((run / "run.toml").read_text())
    tables = {name: record[name] for name in record if name not in ("machine", "versions")}
    newest = max((run / "checkpoints").glob("step-*"))
    files = [
        *newest.glob("*.safetensors"),
        *(run / "model").rglob("*"),
        *(run / "tokenizer").glob("*"),
    ]
    files = [file for file in files if file.is_file() and file.name != "README.md"]
    digests = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    return {"metrics": metrics, **tables, **digests}


def compare(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Return the names of the different outputs."""
    return [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]


if __name__ == "__main__":
    main()
