"""Check that a change adds plain technical English alone.

    python .ci/check_language.py [--since COMMIT] [PATH ...]

A docstring is flagged for an opening or a phrase that hides its subject, such as "What is held
out"; a name is flagged if it says nothing alone, such as `kind`. Flags are errors if the change
since COMMIT adds them; moving them is none. With paths, all flags in these files are listed.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
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


class Flag(NamedTuple):
    """A word that a check refuses, and its line."""

    check: str
    word: str
    line: int
    text: str


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


def find_flags(source: str) -> Iterator[Flag]:
    """Yield the flags of a file's text."""
    tree, lines = ast.parse(source), source.splitlines()
    for line, text in find_docstrings(tree):
        for check, match in (("opening", OPENINGS.match(text)), ("phrase", PHRASES.search(text))):
            if match:
                yield Flag(check, match[0].lower(), line, text[:90])
    for line, name in find_names(tree):
        if (word := name.strip("_").lower()) in NAMES:
            yield Flag("name", word, line, lines[line - 1].strip())


def git(*arguments: str) -> str:
    """Return the output of git; an empty text if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout


def added_flags(commit: str) -> Iterator[tuple[str, Flag]]:
    """Yield the flags in the working tree that the commit lacks, each with its path."""
    changed = git("diff", "--name-only", "--no-renames", commit, "--", "*.py").split()
    changed += git("ls-files", "--others", "--exclude-standard", "*.py").split()
    before = [flag for path in changed for flag in find_flags(git("show", f"{commit}:{path}"))]
    paths = [path for path in changed if (ROOT / path).exists()]
    after = [(path, flag) for path in paths for flag in find_flags((ROOT / path).read_text())]
    more = Counter(flag[:2] for _, flag in after) - Counter(flag[:2] for flag in before)
    texts = {(flag.word, flag.text) for flag in before}
    for path, flag in after:
        if more[flag[:2]] and (flag.word, flag.text) not in texts:
            yield path, flag


def main() -> int:
    """Print the flags that a change adds; return the exit code."""
    parser = argparse.ArgumentParser(description="Check docstrings and names.")
    parser.add_argument("paths", nargs="*", type=Path, help="list all flags of these files")
    parser.add_argument("--since", metavar="COMMIT", default="HEAD~1", help="default: HEAD~1")
    args = parser.parse_args()
    files = [f for path in args.paths for f in (sorted(path.rglob("*.py")) or [path])]
    flags = [(str(file), flag) for file in files for flag in find_flags(file.read_text())]
    flags = flags if args.paths else [*added_flags(args.since)]
    for path, flag in flags:
        print(f"{path}:{flag.line}: {flag.check} {flag.word!r}: {flag.text}")
    return bool(flags) and not args.paths


if __name__ == "__main__":
    sys.exit(main())
