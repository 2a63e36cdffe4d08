"""Check a machine with a GPU in one run: doctor, tests, a training, texts from it, speeds.

    make gpu-wheels                    # here: packages that a bare machine lacks, into .wheels/
    python3 bench/gpu_check.py [OUT [STEP ...]]   # there, with torch for CUDA and .wheels/

Nothing is installed: the code runs from src/. Each step has its time limit, and a failed one does
not end the others. Their whole output is in OUT (default: build/gpu), a line for each is printed.
All take about a quarter of an hour; the names of some steps after OUT run these alone.
The exit code is the number of failed steps. `TIEDGPT_TEST_DEVICE=cpu` checks the script on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIEDGPT = [sys.executable, "-m", "tiedgpt"]
PYTEST = [
    sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider",
    "-o", "addopts=", "-o", "filterwarnings=", "tests/gpu",
]  # fmt: skip
STEPS: dict[str, tuple[int, list[str]]] = {
    "doctor": (60, [*TIEDGPT, "doctor", "--format", "json"]),
    "tests": (240, PYTEST),
    "train": (150, [*TIEDGPT, "train", "--minutes", "1", "--out", "{out}/run"]),
    "generate": (60, [*TIEDGPT, "generate", "{out}/run", "--prompt", "The", "-f", "json"]),
    "generate int8": (90, [*TIEDGPT, "generate", "{out}/run", "--precision", "int8"]),
    "bench": (540, [sys.executable, "bench/gpu.py", "--out", "{out}/gpu.jsonl"]),
}
"""The seconds and the command of each step."""


def unpack_wheels(site: Path) -> None:
    """Unpack the pure Python wheels that were brought along."""
    for wheel in (ROOT / ".wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)


def run_step(name: str, seconds: int, command: list[str], out: Path) -> bool:
    """Run a step, print its result as a JSON line, and return whether it succeeded."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{out / 'site'}"}
    began, log = time.perf_counter(), out / f"{name}.txt"
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                [word.replace("{out}", str(out)) for word in command], cwd=ROOT, env=environment,
                stdout=file, stderr=subprocess.STDOUT, timeout=seconds,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    lines = [line[:200] for line in log.read_text(errors="replace").splitlines()]
    result = {"step": name, "exit": code, "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(result | {"end": lines[-40:] if code else lines[-3:]}), flush=True)
    return code == 0


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    unpack_wheels(out / "site")
    names = sys.argv[2:] or list(STEPS)
    return sum(not run_step(name, *STEPS[name], out) for name in names)


if __name__ == "__main__":
    sys.exit(main())
