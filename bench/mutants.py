"""Put one small fault at a time into the source, and see whether a test fails.

    python bench/mutants.py core [--number 20] [--seed 1] > core.jsonl

The argument names a folder of `src/tiedgpt`, or a pattern of files (`infer/sampling*.py`). Each
fault (a "mutant") is put into a temporary copy of `src`. The tests of the folder run until one
fails, first those about the changed module. Prints a line of JSON for
each mutant: file, line, kind, before, after, outcome ("killed", "survived", or "out of time"), the
first failing test with its message, seconds. The last line names those of these tests that fail
without a fault: what they killed is not judged; "" stands for pytest, which did not start. Whether
a survivor changes what the program does must be judged by reading.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/tiedgpt")
OPERATORS = {
    "Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">"),
    "Eq": ("==", "!="), "NotEq": ("!=", "=="), "Is": ("is", "is not"), "IsNot": ("is not", "is"),
    "In": ("in", "not in"), "NotIn": ("not in", "in"), "Add": ("+", "-"), "Sub": ("-", "+"),
    "Mult": ("*", "/"), "Div": ("/", "*"), "FloorDiv": ("//", "*"), "Mod": ("%", "*"),
    "Pow": ("**", "*"), "BitAnd": ("&", "|"), "BitOr": ("|", "&"), "And": ("and", "or"),
    "Or": ("or", "and"),
}  # fmt: skip
SYMMETRIC = ("max", "min", "torch.promote_types", "math.gcd")
"""Functions whose arguments have no order."""
WARM = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "numba", "hypothesis",
    "tokenizers", "transformers.models.gpt2.modeling_gpt2",
)  # fmt: skip
"""Libraries that are imported once, before the processes of the tests are forked."""
MEMORY = 12 << 30
"""Bytes that a process of tests may take: a loop without end could fill the machine's."""


class Mutant(NamedTuple):
    """A replacement of the characters `start` to `end` of a file."""

    path: Path
    line: int
    kind: str
    start: int
    end: int
    after: str


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every fault that the script can put into a file."""
    text = path.read_text()
    starts = list(itertools.accumulate((len(s) for s in text.encode().splitlines(True)), initial=0))

    def offset(line: int, column: int) -> int:
        return len(text.encode()[: starts[line - 1] + column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        end = offset(node.end_lineno or 0, node.end_col_offset or 0)
        return offset(node.lineno, node.col_offset), end

    def between(left: ast.expr, right: ast.expr, operator: ast.AST, kind: str) -> Iterator[Mutant]:
        before, after = OPERATORS.get(type(operator).__name__, ("", ""))
        match = re.compile(re.escape(before)).search(text, span(left)[1], span(right)[0])
        if before and match:
            yield Mutant(path, left.end_lineno or 0, kind, *match.span(), after)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Constant(value=bool() as value):
                yield Mutant(path, node.lineno, "constant", *span(node), str(not value))
            case ast.Constant(value=int() | float() as value):
                changed = value + 1 if isinstance(value, int) else value * 1.5 or 0.1
                yield Mutant(path, node.lineno, "constant", *span(node), repr(changed))
            case ast.Compare(ops=[operator], comparators=[right]):
                yield from between(node.left, right, operator, "comparison")
            case ast.BinOp():
                yield from between(node.left, node.right, node.op, "operator")
            case ast.BoolOp(values=[left, right, *_]):
                yield from between(left, right, node.op, "and/or")
            case ast.UnaryOp(op=ast.Not() | ast.USub() as operator):
                start = span(node)[0]
                end = start + (3 if isinstance(operator, ast.Not) else 1)
                yield Mutant(path, node.lineno, "sign", start, end, "")
            case ast.Call(args=[first, second, *_]) if ast.unparse(node.func) not in SYMMETRIC:
                (start, comma), (after_comma, end) = span(first), span(second)
                swapped = text[after_comma:end] + text[comma:after_comma] + text[start:comma]
                yield Mutant(path, node.lineno, "arguments", start, end, swapped)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = span(node.test)
            yield Mutant(path, node.lineno, "condition", start, end, f"not ({text[start:end]})")
        if isinstance(node, ast.AugAssign | ast.Expr | ast.Raise | ast.Continue | ast.Break) or (
            isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
        ):  # without a variable at all, everything fails
            yield Mutant(path, node.lineno, "statement", *span(node), "pass")
        for child in inner(node):
            yield from visit(child)

    yield from visit(ast.parse(text))


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below, without docstrings, annotations, and messages of errors."""
    skipped: list[Any] = [getattr(node, name, None) for name in ("annotation", "returns")]
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    for child in ast.iter_child_nodes(node):
        text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if child not in skipped and not text:
            yield child


def sample(paths: list[Path], number: int, draw: random.Random) -> Iterator[Mutant]:
    """Yield mutants: the files in turn, of each file the kinds at random, no place twice."""
    places = {path: list(mutants(path)) for path in draw.sample(paths, len(paths))}
    while number and any(places.values()):
        for path in [path for path, left in places.items() if left][:number]:
            kind = draw.choice(sorted({mutant.kind for mutant in places[path]}))
            mutant = draw.choice([mutant for mutant in places[path] if mutant.kind == kind])
            places[path].remove(mutant)
            number -= 1
            yield mutant


def tests_of(path: Path) -> list[str]:
    """Return the test files of the folder: the module's own, then by mentions of it in a line."""
    module = path.relative_to(ROOT / PACKAGE).with_suffix("")
    names = [n.name for n in ast.parse(path.read_text()).body if hasattr(n, "name")]
    words = re.compile("|".join(rf"\b{w}\b" for w in [".".join(module.parts), *names]))

    def rank(file: Path) -> tuple[bool, float]:
        text = file.read_text()
        return file.stem != f"test_{module.name}", -len(words.findall(text)) / text.count("\n")

    files = sorted((ROOT / "tests" / module.parts[0]).rglob("test_*.py"), key=rank)
    return [str(file.relative_to(ROOT)) for file in files]


class FirstFailure:
    """A plugin of pytest that writes the first failure to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a failed test and its message."""
        if report.failed and not self.path.exists():
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)[-300:]
            self.path.write_text(json.dumps([report.nodeid, message[:300]]))

    pytest_collectreport = pytest_runtest_logreport


def run_tests(source: Path, tests: list[str], limit: float) -> tuple[str, list[str]]:
    """Return "killed", "survived" or "out of time", and the first failing test and its message."""
    failure = source.parent / "failure.json"
    failure.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        run_in_child(source, tests, failure)
    end = time.monotonic() + limit
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "out of time", []
        time.sleep(0.1)
    if failure.exists():
        test = json.loads(failure.read_text())  # a timeout may be the load of the machine
        return "out of time" if test[1].startswith("Failed: Timeout") else "killed", test
    if done[1]:  # nothing could be collected
        return "killed", ["", (source.parent / "output.txt").read_text()[-300:]]
    return "survived", []


def run_in_child(source: Path, tests: list[str], failure: Path) -> NoReturn:
    """Run the tests file by file until one fails, and end this process."""
    code = 3
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(ROOT)
        os.environ |= {"PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": str(source)}
        sys.path[:0] = [str(source), str(ROOT)]
        output = os.open(source.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        options = ["-x", "-n0", "-pno:cacheprovider", "--no-header", "-otimeout=60"]
        for test in tests:
            code = int(pytest.main([*options, test], plugins=[FirstFailure(failure)]))
            code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
            if code:
                break
    finally:
        sys.stdout.flush()
        os._exit(code)


def judge(mutant: Mutant, source: Path, limit: float) -> dict[str, Any]:
    """Run the tests with the fault, and return the line of the results."""
    text, began = mutant.path.read_text(), time.monotonic()
    copy = source / mutant.path.relative_to(ROOT / "src")
    compiled = Path(importlib.util.cache_from_source(str(copy)))
    copy.write_text(text[: mutant.start] + mutant.after + text[mutant.end :])
    compiled.unlink(missing_ok=True)
    outcome, failure = run_tests(source, tests_of(mutant.path), limit)
    copy.write_text(text)
    compiled.unlink(missing_ok=True)
    return {
        "file": str(mutant.path.relative_to(ROOT / PACKAGE)), "line": mutant.line,
        "kind": mutant.kind, "before": text[mutant.start : mutant.end], "after": mutant.after,
        "outcome": outcome, "test": failure, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def main() -> None:
    """Print the results of a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder or pattern of files below src/tiedgpt")
    parser.add_argument("--number", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=200, help="seconds for a mutant")
    args = parser.parse_args()
    folder = ROOT / PACKAGE / args.folder
    files = folder.rglob("*.py") if folder.is_dir() else (ROOT / PACKAGE).glob(args.folder)
    paths = sorted(path for path in files if path.name != "__init__.py")
    for name in WARM:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()  # each process would search these objects
    os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / "build" / "mutants"))
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=2)
        killers = set()
        for mutant in sample(paths, args.number, random.Random(args.seed)):
            result = judge(mutant, source, args.limit)
            killers.update(result["test"][:1])
            print(json.dumps(result, ensure_ascii=False), flush=True)
        tests = {test: [test or "tests/test_names.py"] for test in killers}
        failing = [test for test in sorted(tests) if run_tests(source, tests[test], 300)[1]]
        print(json.dumps({"fails without a fault": failing}), flush=True)


if __name__ == "__main__":
    main()
