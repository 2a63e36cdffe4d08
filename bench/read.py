"""Loading GPT-2 124M from every format that is written here: time, and peak memory over its size.

    python bench/read.py

Random weights, fp32, a small vocabulary's tokenizer for GGUF. Each file is loaded in a fresh
process after the libraries were imported; the peak counts from there.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUFFIXES = {"transformers": "", "gguf": ".gguf", "onnx": ".onnx", "nanogpt": ".pt"}
LOAD = """
import sys, time, torch, tiedgpt.weights.load
from pathlib import Path
from tiedgpt import GPT
def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
Path("/proc/self/clear_refs").write_text("5")
before, began = kilobytes("VmRSS"), time.perf_counter()
model = GPT.from_pretrained(sys.argv[1])
print(time.perf_counter() - began, kilobytes("VmHWM") - before)
"""


def main() -> None:
    from tiedgpt import GPT, GPTConfig, Tokenizer
    from tiedgpt.weights.convert import convert
    from tiedgpt.weights.load import load

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        tokenizer = Tokenizer.train(["two words and a few more " * 9], 300)
        eos = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        GPT(GPTConfig.preset("gpt2", **eos)).save_pretrained(source)
        loaded = load(source)
        for to, suffix in SUFFIXES.items():
            path = Path(directory) / f"gpt2{suffix}"
            options = {"approximate_gelu": True} if to == "nanogpt" else {}
            began = time.perf_counter()
            written = convert(loaded, path, to, tokenizer=tokenizer, **options)
            seconds = time.perf_counter() - began
            command = [sys.executable, "-c", LOAD, str(path)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            took, kilobytes = map(float, out.split())
            found[to] = {
                "MB": round(written.n_bytes / 1e6, 1),
                "written, read again and compared, s": round(seconds, 2),
                "loaded, s": round(took, 2),
                "peak over the file's size": round(kilobytes * 1024 / written.n_bytes, 3),
            }
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, **found}, indent=2))


if __name__ == "__main__":
    main()
