"""Count the functions that a training enters before its first optimizer step, or a model's opening.

    python bench/count_calls.py [--path train|load|audit|fix|engine|hub] [--list]

    train     `tiedgpt train TEXT --size tiny --steps 2`, until the first optimizer step
    load      `GPT.from_pretrained(DIRECTORY)`
    audit     `tiedgpt tie audit DIRECTORY`
    fix       `tiedgpt tie fix DIRECTORY COPY --keep input`
    engine    `Engine(DIRECTORY)`, a text and its chat template
    hub       the same with the name of a repository that is in the cache

Runs one in this process and counts each function of `src` once, with properties, validators and
generators. Functions that only imports call are counted apart. A change of file is a call into
another file than the previous call. An audit hook counts how often each file of the model is
opened to be read; PYTHONPATH=OTHER/src counts in another checkout.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from types import CodeType, FrameType
from typing import Any

import tiedgpt
from tiedgpt.cli.main import main as run_command

SOURCE = Path(tiedgpt.__file__).parent
PATHS = ("train", "load", "audit", "fix", "engine", "hub")
REPOSITORY, COMMIT = "somebody/model", "0" * 40
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


def count_calls(path: str) -> tuple[CallCounter, Counter[str]]:
    """Return the calls of a path, and the number of times that each file is opened to be read."""
    counter, opened = CallCounter(), Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        run = _prepare(path, Path(directory))

        def count_open(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and sys.getprofile() is counter and arguments[1] is not None:
                name, mode, _ = arguments
                if str(name).startswith(directory) and not set("wxa") & set(mode):
                    copied = "copy" if "copy" in str(name)[len(directory) :] else "source"
                    opened[f"{copied}/{os.path.basename(name)}"] += 1

        sys.addaudithook(count_open)
        sys.setprofile(counter)
        try:
            run()
        except FirstStepError:
            pass
        finally:
            sys.setprofile(None)
    return counter, opened


def _prepare(path: str, directory: Path) -> Callable[[], object]:
    """Return the function that is counted; its models and texts are written here."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if path == "train":

        def stop(*_: Any) -> None:
            sys.setprofile(None)
            raise FirstStepError

        register_optimizer_step_pre_hook(stop)
        text = directory / "my.txt"
        text.write_text(TEXT)
        options = ["--size", "tiny", "--steps", "2", "--out", f"{directory}/run"]
        return lambda: run_command(["train", str(text), *options])
    model = directory / "model"
    _write_model(model, tied=path != "fix")
    if path == "audit":
        return lambda: run_command(["tie", "audit", str(model)])
    if path == "fix":
        copy = str(directory / "copy")
        return lambda: run_command(["tie", "fix", str(model), copy, "--keep", "input"])
    if path == "load":
        return lambda: tiedgpt.GPT.from_pretrained(model)
    from tiedgpt.infer import Engine

    # Read when the hub's library is imported.
    os.environ |= {"HF_HUB_CACHE": str(directory), "HF_HUB_OFFLINE": "1"}
    cached = directory / f"models--{REPOSITORY.replace('/', '--')}"
    copytree(model, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    source = str(model) if path == "engine" else REPOSITORY

    def generate() -> None:
        with Engine(source, backend="torch") as engine:
            engine.generate("It was", max_new_tokens=2)
            assert engine.template is not None

    return generate


def _write_model(directory: Path, *, tied: bool) -> None:
    """Write a small model that claims to be tied, with a tokenizer and a chat template."""
    from tiedgpt.data import TEMPLATES
    from tiedgpt.data.templates import write_template

    template = TEMPLATES["chatml"]
    tokenizer = tiedgpt.Tokenizer.train([TEXT], 300).with_special_tokens(template.tokens)
    config = tiedgpt.GPTConfig(
        vocab_size=len(tokenizer), n_positions=16, n_embd=32, n_layer=2, n_head=4,
        tie_word_embeddings=tied,
    )  # fmt: skip
    tiedgpt.GPT(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_template(template, tokenizer, directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))


def main() -> None:
    """Print the counts."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", choices=PATHS, default="train", help="what is counted")
    parser.add_argument("--list", action="store_true", help="print the functions of each file")
    arguments = parser.parse_args()
    counter, opened = count_calls(arguments.path)
    files = Counter(code.co_filename for code in counter.functions)
    if arguments.list:
        for path in files:
            names = [code.co_qualname for code in counter.functions if code.co_filename == path]
            print(f"{Path(path).relative_to(SOURCE)} ({len(names)}): {', '.join(names)}")
    print(
        f"{len(counter.functions)} functions in {len(files)} files, {counter.file_changes} changes "
        f"of file; {len(counter.at_import)} more at import"
    )
    if arguments.path != "train":
        times = ", ".join(f"{name} {n}" for name, n in sorted(opened.items()))
        print(f"{len(opened)} files of the model, opened {opened.total()} times: {times}")


if __name__ == "__main__":
    main()
