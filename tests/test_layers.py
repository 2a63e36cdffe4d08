"""Imports go strictly down, and quick commands import no torch."""

import ast
import functools
import graphlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiedgpt

SOURCE = Path(tiedgpt.__file__).parent
LAYERS = {
    "errors": -3, "names": -2, "options": -2, "signatures": -1, "files": -1, "runtime": -1,
    "core": 0, "text": 1, "weights": 2, "data": 2,
    "heads": 3, "tie": 3, "plots": 3, "infer": 3, "tune": 4, "inspect": 4, "evaluate": 4,
    "train": 5, "serve": 6, "lessons": 6, "cli": 7, "__main__": 8,
}  # fmt: skip
DOORS = {
    ("core/model.py", "from_pretrained", "tiedgpt.weights.load"),
    ("core/model.py", "save_pretrained", "tiedgpt.weights.formats.transformers.writer"),
    ("core/model.py", "push_to_hub", "tiedgpt.weights.hub"),
    ("text/tokenizer.py", "from_pretrained", "tiedgpt.weights.source"),
}
"""The ways up that people expect on a class: file, method, module."""


def modules():
    """Return the path of each module of the project by its name."""
    return {
        ".".join(("tiedgpt", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in SOURCE.rglob("*.py")
    }


def imports(tree: ast.Module):
    """Yield (module, imported name or None, innermost function or None) of the project's imports.

    Imports inside functions and for type checkers count.
    """

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are written whole"
                yield from ((child.module, alias.name, function) for alias in child.names)
            elif isinstance(child, ast.Import):
                yield from ((alias.name, None, function) for alias in child.names)
            inner = child.name if isinstance(child, ast.FunctionDef) else function
            yield from walk(child, inner)

    for module, name, function in walk(tree, None):
        if module.split(".")[0] == "tiedgpt" and name != "__version__":
            yield module, name, function


@functools.cache
def arrows():
    """Return (importing module, imported module, the import as in `DOORS`), without the package."""
    paths, lines = modules(), []
    for here, path in paths.items():
        place = path.relative_to(SOURCE).as_posix()
        for module, name, function in imports(ast.parse(path.read_text())):
            there = f"{module}.{name}" if f"{module}.{name}" in paths else module
            if "tiedgpt" not in (here, there) and here != there:
                lines.append((here, there, (place, function, there)))
    return lines


def test_imports_go_strictly_down_between_folders():
    wrong, doors = [], set()
    for here, there, door in arrows():
        above, below = (name.split(".")[1] for name in (here, there))
        if above == below or LAYERS.get(below, 0) < LAYERS.get(above, 0):
            continue
        doors.add(door)
        if door not in DOORS:
            wrong.append(f"{here} imports {there}")
    assert not wrong
    assert doors == DOORS, "a door that nobody uses any more should be closed"


def test_no_file_imports_itself_through_others():
    """Inside a folder, too, imports go down: at module level, inside functions and for types."""
    graph = {}
    for here, there, door in arrows():
        if door not in DOORS:
            graph.setdefault(here, set()).add(there)
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that shows a circle


def test_every_folder_has_its_layer():
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders <= LAYERS.keys()


def test_no_module_has_a_vague_name():
    vague = {"utils", "helpers", "common", "misc"}
    assert not [path for path in SOURCE.rglob("*.py") if path.stem in vague]


ECONOMY = ("loss.py",)
"""Modules that only save memory in training, not counted as the network."""


def test_the_core_fits_in_a_readers_head():
    lines = {
        path.name: sum(bool(line.strip()) for line in path.read_text().split("\n"))
        for path in (SOURCE / "core").glob("*.py")
    }
    assert sum(n for name, n in lines.items() if name not in ECONOMY) < 600
    assert sum(lines.values()) < 900


QUICK = {
    "the package": "import tiedgpt",
    "errors and files": "import tiedgpt.errors, tiedgpt.files, tiedgpt.runtime",
    "a config": "from tiedgpt import GPTConfig; GPTConfig.preset('gpt3-175b').parameter_count()",
    "a tokenizer": "from tiedgpt import Tokenizer; Tokenizer.train(['abc'], 300).encode('abc')",
    "data": "import tiedgpt.data",
    "safetensors": "import tiedgpt.weights.containers",
    "a packed model": "import tiedgpt.weights.formats.packed, tiedgpt.infer.packed_session",
    "the engine": "from tiedgpt.infer import Engine; import tiedgpt.infer.scheduler",
    "usage": "from tiedgpt.cli.main import main; main(['--help'])",
    "curves": "import tiedgpt.cli.plot, tiedgpt.plots.training, tiedgpt.plots.terminal",
    "help of generate": (
        "from tiedgpt.cli.main import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass"
    ),
    "the server": "import tiedgpt.serve.app, tiedgpt.serve.server, tiedgpt.cli.serve",
    "options": "import tiedgpt.cli.train, tiedgpt.cli.generate, tiedgpt.cli.doctor",
    "inspections": "import tiedgpt.inspect.registry, tiedgpt.cli.inspect",
    "compilers of kernels": (
        "import tiedgpt.infer.kernels.compilation, tiedgpt.infer.kernels.forward\n"
        "import tiedgpt.infer.kernels.sampling_kernels, tiedgpt.train.step.kernels.attention"
    ),
}


EACH_BY_ITSELF = """
import json, os, sys
import fastapi, numpy, prometheus_client, pydantic, rich.console, tokenizers, uvicorn
failed = []
for name, program in json.load(sys.stdin).items():
    if os.fork() == 0:
        exec(program)
        os._exit("torch" in sys.modules)
    if os.wait()[1]:
        failed.append(name)
sys.exit(", ".join(failed) or 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_quick_modules_import_no_torch():
    command, programs = [sys.executable, "-c", EACH_BY_ITSELF], json.dumps(QUICK)
    done = subprocess.run(command, input=programs, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
