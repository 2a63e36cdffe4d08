"""Encoding speed on real text: ours (tiktoken on the same ranks) and `tokenizers`, in turn.

    python bench/encode.py [TOKENIZER] [--rounds 5]

TOKENIZER is a directory; without it a vocabulary of 8,192 is trained on the embedded corpus, which
is also the text. The ids of both are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import tiktoken
import tokenizers

from tiedgpt import Tokenizer
from tiedgpt.data import python_documentation


def seconds(encode, text: str) -> float:
    began = time.perf_counter()
    encode(text)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    text = "\n".join(document.text for document in python_documentation())
    if args.tokenizer:
        ours = Tokenizer.from_pretrained(args.tokenizer)
    else:
        ours = Tokenizer.train([text], 8192)
    with tempfile.TemporaryDirectory() as directory:
        ours.save_pretrained(directory)
        theirs = tokenizers.Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert ours.encode_array(text).tolist() == theirs.encode(text).ids
    times: dict[str, list[float]] = {"ours": [], "tokenizers": []}
    for _ in range(args.rounds):
        times["ours"].append(seconds(ours.encode_array, text))
        times["tokenizers"].append(seconds(lambda t: theirs.encode(t).ids, text))
    ratios = [a / b for a, b in zip(times["tokenizers"], times["ours"], strict=True)]
    size = len(text.encode()) / 2**20
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"tiktoken": tiktoken.__version__, "tokenizers": tokenizers.__version__},
        "vocabulary": len(ours),
        "MiB": round(size, 2),
        "MiB/s": {name: round(size / statistics.median(t), 2) for name, t in times.items()},
        "speed ratio (median of ratios)": round(statistics.median(ratios), 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
