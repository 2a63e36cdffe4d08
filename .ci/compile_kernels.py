"""Compile the kernels of inference and training for each class of CPUs, for a wheel.

    python .ci/compile_kernels.py [DIRECTORY]

`make package` calls this on Linux; it takes some minutes. Small models are run and trained to learn
which kernels there are, for which types of arguments; what they need is compiled for each class of
`cpu_targets.py` of this machine, x86-64 or aarch64, by Numba's settings for another CPU. The files
go where `code_files.py` looks for those of a wheel: the same source finds them there, too.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main as tiedgpt
from tiedgpt.infer import Engine, GenerationConfig
from tiedgpt.infer.kernels import code_files, compile_cache, cpu_targets
from tiedgpt.infer.kernels.arguments import Record
from tiedgpt.infer.packed_session import ACTIVATION_DTYPES

TARGETS = cpu_targets.TARGETS[platform.machine()]
Request = tuple[str, str, Any]
"""A kernel's module, its name, and an example of its arguments."""
TYPES = {"forward": 4, "fill_rows": 1, "attention": 2, "attention_gradient": 2, "dropout": 2}
TYPES |= {"gelu": 2, "gelu_gradient": 2, "softmax_gradient": 2}
"""How many types of arguments each kernel has: a precision each."""
LINE = "It was the year {}, and the cat with {} lives sat on mat {}.\n"
TEXT = "".join(LINE.format(1900 + n % 99, n % 9, n * n) for n in range(999))


def requests() -> dict[str, Request]:
    """Return what is compiled when models of each precision run and are trained, by file name."""
    requested: dict[str, Request] = {}
    start = compile_cache.start_compiler

    def record(module: str, name: str, arguments: Any) -> Any:
        file = compile_cache.Kernel(module, name).file(tuple(Record(arguments).kinds))
        requested[file] = module, name, arguments
        return start(module, name, arguments)

    with tempfile.TemporaryDirectory() as place, patch.dict(os.environ, NUMBA_CACHE_DIR=place):
        with patch.object(compile_cache, "start_compiler", record):
            infer()
            train(Path(place))
    counts = Counter(name for _, name, _ in requested.values())
    if counts != TYPES:
        raise SystemExit(f"these were compiled: {counts}; the wheel holds: {TYPES}")
    return requested


def infer() -> None:
    """Generate by engines of all precisions."""
    config = GPTConfig(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=300)
    for precision in ACTIVATION_DTYPES:
        with Engine(GPT(config), precision, backend="kernels") as engine:
            engine.generate([1, 2, 3], GenerationConfig(max_new_tokens=3, temperature=1.0))


def train(place: Path) -> None:
    """Train in each precision, with dropout."""
    text = place / "text.txt"
    text.write_text(TEXT)
    for dtype in ("fp32", "bf16"):
        options = ["--size", "tiny", "--vocab-size", "512", "--steps", "2", "--dropout", "0.1"]
        options += ["--dtype", dtype]
        assert tiedgpt(["train", str(text), *options, "--out", str(place / dtype)]) == 0


def compile_for(target: str, file: str, request: Request, directory: Path) -> int:
    """Write a kernel's file for a class of CPUs; return its size in bytes."""
    module, name, arguments = request
    settings = {
        "NUMBA_CPU_NAME": TARGETS[target].cpu,
        "NUMBA_CPU_FEATURES": TARGETS[target].features,
    }
    process = compile_cache.start_compiler(module, name, arguments, **settings)
    data, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{name} was not compiled for {target}")
    key = f"{file}-{code_files.source_digest(module):08x}-{target}"
    code_files.write(directory, key, data)
    (written,) = directory.glob(f"{key}-{code_files.CHECKSUM}.so")
    return written.stat().st_size


def main() -> None:
    """Write the files of all classes."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else code_files.IN_WHEEL
    directory.mkdir(parents=True, exist_ok=True)
    requested = requests()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for target in TARGETS:
            work = [pool.submit(compile_for, target, *it, directory) for it in requested.items()]
            sizes = [job.result() for job in work]
            print(f"{target}: {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
