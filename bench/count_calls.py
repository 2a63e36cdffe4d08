"""Count the functions that a training enters before its first optimizer step.

    python bench/count_calls.py [--list]

Runs `tiedgpt train TEXT --size tiny --steps 2` in this process and counts each function of `src`
once, with properties, validators and generators. Functions that only imports call are counted
apart. A change of file is a call into another file than the previous call.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiedgpt
from tiedgpt.cli.main import main as run_command

SOURCE = Path(tiedgpt.__file__).parent
TEXT = "It was the best of times, it was the worst of times. " * 400


class FirstStepError(Exception):
    """The first optimizer step begins."""


class CallCounter:
    """A profile function that records the functions of `src` in the order of their first call."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, int] = {}
        """Number of calls by function."""
        self.at_import: set[CodeType] = set()
        self.file_changes = 0
        self._last_file = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(SOURCE)):
            return
        is_body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or a class
        if is_body or code.co_name in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            return
        if code not in self.functions and _is_importing(frame):
            self.at_import.add(code)
            return
        self.at_import.discard(code)
        self.functions[code] = self.functions.get(code, 0) + 1
        self.file_changes += code.co_filename != self._last_file
        self._last_file = code.co_filename


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module body of `src` is among the callers."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(str(SOURCE)):
            return True
        frame = frame.f_back
    return False


def count_calls() -> CallCounter:
    """Return the calls before the first optimizer step of a small training."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def stop(*_: Any) -> None:
        sys.setprofile(None)
        raise FirstStepError

    counter = CallCounter()
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "my.txt"
        text.write_text(TEXT)
        options = ["--size", "tiny", "--steps", "2", "--out", f"{directory}/run"]
        register_optimizer_step_pre_hook(stop)
        sys.setprofile(counter)
        try:
            run_command(["train", str(text), *options])
        except FirstStepError:
            return counter
        finally:
            sys.setprofile(None)
    raise RuntimeError("the training ended before an optimizer step")


def main() -> None:
    """Print the counts."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the functions of each file")
    arguments = parser.parse_args()
    counter = count_calls()
    files = Counter(code.co_filename for code in counter.functions)
    if arguments.list:
        for path in files:
            names = [code.co_qualname for code in counter.functions if code.co_filename == path]
            print(f"{Path(path).relative_to(SOURCE)} ({len(names)}): {', '.join(names)}")
    print(
        f"{len(counter.functions)} functions in {len(files)} files, {counter.file_changes} changes "
        f"of file; {len(counter.at_import)} more at import"
    )


if __name__ == "__main__":
    main()
