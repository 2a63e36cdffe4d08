"""Check that docstrings and names are plain technical English.

    python .ci/check_language.py [--list FOLDER]

A docstring is flagged for an opening or a phrase that hides its subject, such as "What is held
out"; a name is flagged if it says nothing alone, such as `kind`. `language.json` holds the flags
that remain in each folder. More flags than that are an error; fewer lower the stored numbers.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).with_name("language.json")
OPENINGS = re.compile(
    r"(of|what|who|whose|where|that|such|one that|those|nothing|so (many|long|much)|have|let|say|"
    r"tell|be|for how|as|(on|in|by|with|to|from) which)\b",
    re.IGNORECASE,
)
PHRASES = re.compile(
    r"\b(of which|ones? that|such a one|goes? by|go(es)? on (here|there)|all the same|as it is|"
    r"as they are|by far|nobody|(is|are) no\b|it has not|has none|is none|of (its|their|his) own|"
    r"theirs|what (it|is|was|were|they|one|an?|the|this|that|no|must|may|can|cannot|comes|came|"
    r"stands|others)\b|where (nothing|nobody|none|there|one|it|they|that|this|some|many|no)\b|"
    r"who(ever)? (gets|asks|wants|reads|calls|is)|thus|whither|wherein|how (it|they) (fares?|goes)"
    r"|(is|are) (had|made|come|begun|gone)\b|let .{0,30} have the|beside (it|them|others)|"
    r"for it (is|has))",
    re.IGNORECASE,
)
NAMES = set(
    "asked begun came come each form found given gone heed held kept kind known left made meant "
    "own part place plain rate rule said shown theirs told wanted way whole".split()
)


def find_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            or not body
        ):
            continue
        for before, item in zip([ast.Assign(), *body], body, strict=False):
            match item:
                case ast.Expr(ast.Constant(str(text))) if isinstance(
                    before, (ast.Assign, ast.AnnAssign)
                ):
                    yield item.lineno, " ".join(text.split())


def find_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, argument, function and class."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.arg(name):
                yield node.lineno, name
            case ast.FunctionDef(name) | ast.ClassDef(name):
                yield node.lineno, name


def find_flags(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each flag of a file: "docstrings" or "names", and its place and text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, text in find_docstrings(tree):
        if OPENINGS.match(text) or PHRASES.search(text):
            yield "docstrings", f"{path.relative_to(ROOT)}:{line} {text[:90]}"
    for line, name in find_names(tree):
        if name.strip("_").lower() in NAMES:
            yield "names", f"{path.relative_to(ROOT)}:{line} {name}"


def count_flags() -> dict[str, dict[str, list[str]]]:
    """Return the flags of each folder."""
    flags: dict[str, dict[str, list[str]]] = {}
    for top in ("src/tiedgpt", "tests", "bench", "examples", "docs", ".ci"):
        for path in sorted((ROOT / top).rglob("*.py")):
            inside = path.relative_to(ROOT / top).parts
            folder = f"{top}/{inside[0]}" if len(inside) > 1 else top
            lists = flags.setdefault(folder, {"docstrings": [], "names": []})
            for subject, flag in find_flags(path):
                lists[subject].append(flag)
    return flags


def main() -> int:
    """Compare the flags with the stored numbers; return the exit code."""
    parser = argparse.ArgumentParser(description="Check docstrings and names.")
    parser.add_argument("--list", metavar="FOLDER", help="print all flags of a folder")
    folder = parser.parse_args().list
    flags = count_flags()
    if folder is not None:
        print(*flags[folder]["docstrings"], *flags[folder]["names"], sep="\n")
        return 0
    stored = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    counts = {name: {subject: len(x) for subject, x in flags[name].items()} for name in flags}
    worse = 0
    for name in flags:
        for subject, count in counts[name].items():
            limit = stored.get(name, {}).get(subject, 0) if stored else count
            if count > limit:
                worse += 1
                print(f"{name}: {count} flagged {subject}, at most {limit} may remain; see")
                print(f"  python .ci/check_language.py --list {name}")
    if not worse and counts != stored:
        rows = (f"  {json.dumps(name)}: {json.dumps(counts[name])}" for name in sorted(counts))
        BASELINE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        print(f"{BASELINE.relative_to(ROOT)} is lowered: commit it")
    return worse > 0


if __name__ == "__main__":
    sys.exit(main())
