"""The corpus that is always there: the documentation inside the user's own Python.

Nothing comes in; `python_documentation()` gives the language reference (`pydoc_data.topics`) and
the docstrings of the standard library, one document a topic or module, laid out as `help()` prints
them. Sources are read with `ast` and never imported; only the built-in modules of a fixed list are.
The text depends on the Python installation and on nothing else: no network, clock or hash seed.
"""

import ast
import importlib
import inspect
import os
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tiedgpt.data.corpus import Document
from tiedgpt.data.prose import clean, indent
from tiedgpt.errors import UserError

SKIPPED = frozenset(
    "test tests idle_test idlelib lib2to3 turtledemo encodings ensurepip pydoc_data __pycache__ "
    "__phello__ sitecustomize.py usercustomize.py".split()
)
BUILTIN_MODULES = (
    "builtins _abc _ast _asyncio _bisect _bz2 _codecs _collections _contextvars _csv _datetime "
    "_decimal _functools _heapq _io _json _lzma _operator _pickle _queue _random _signal _socket "
    "_sqlite3 _sre _ssl _statistics _string _struct _symtable _thread _tracemalloc _weakref array "
    "atexit binascii cmath errno faulthandler fcntl gc itertools marshal math mmap posix pwd "
    "pyexpat resource select sys syslog termios time unicodedata zlib"
).split()
SHORTEST = 200  # characters; a module that says less is left out

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def python_documentation() -> tuple[Document, ...]:
    """Return the documents in a fixed order: topics, built-in modules, modules of the library.

    No sentence of the language reference and no docstring is given twice, so a document held out
    for validation is not also trained on. A few megabytes of ASCII, made once a process in seconds.

    Raises:
        UserError: this Python carries neither its topics nor the sources of its library.
    """
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old syntax and old modules of the library warn
        documents = (*_topics(), *_builtin_modules(seen), *_library_modules(seen))
    if not documents:
        raise UserError(
            "this Python carries no documentation of its own (no pydoc_data, no library sources); "
            "name text files to train on instead"
        )
    return documents


def _topics() -> Iterator[Document]:
    """Yield the language reference; topics that lie inside a longer one are dropped."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        return
    cleaned = {name: clean(inspect.cleandoc(text)) for name, text in topics.items()}
    kept, seen = [], set[str]()
    for name in sorted(cleaned, key=lambda name: (-len(cleaned[name]), name)):
        paragraphs = {p for p in cleaned[name].split("\n\n") if len(p) > 60}
        if paragraphs and len(paragraphs & seen) < 0.3 * len(paragraphs):
            kept.append(name)
            seen |= paragraphs
    for name in sorted(kept):
        yield Document(f"python topic {name}", cleaned[name] + "\n")


def _library_modules(seen: set[str]) -> Iterator[Document]:
    """Yield one document a module of the standard library, in the order of the module names."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for directory, folders, files in os.walk(root):  # prunes site-packages, which may be huge
        folders[:] = [name for name in folders if name.isidentifier() and name not in SKIPPED]
        for file in files:
            if file.endswith(".py") and file not in SKIPPED:
                path = Path(directory, file)
                parts = path.relative_to(root).with_suffix("").parts
                modules[".".join(parts).removesuffix(".__init__")] = path
    for name in sorted(modules):
        try:
            tree = ast.parse(modules[name].read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        entries = _entries(tree, seen)
        yield from _module("module", name, ast.get_docstring(tree), entries, seen)


def _entries(scope: ast.Module | ast.ClassDef, seen: set[str]) -> Iterator[str]:
    """Yield each public class and function of a scope that says something new."""
    for node in scope.body:
        if not isinstance(node, Definition) or _is_private(node.name):
            continue
        inner = list(_entries(node, seen)) if isinstance(node, ast.ClassDef) else []
        yield from _entry(_heading(node), ast.get_docstring(node), inner, seen)


def _heading(node: Definition) -> str:
    """Return the line under which `help()` shows a definition, without annotations."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return node.name
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    heading = f"{node.name}({ast.unparse(node.args)})"
    return textwrap.fill(
        heading, 88, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )


def _builtin_modules(seen: set[str]) -> Iterator[Document]:
    """Yield the modules written in C; those that this platform lacks are left out."""
    for name in BUILTIN_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        entries = _live_entries(module, _is_builtin, seen)
        yield from _module("built-in module", name.lstrip("_"), module.__doc__, entries, seen)


def _live_entries(owner: object, wanted: Callable[[object], bool], seen: set[str]) -> Iterator[str]:
    """Yield the documented members of a live module or class, in the order of their names."""
    for name, value in sorted(vars(owner).items()):
        doc = getattr(value, "__doc__", None)
        if name.startswith("_") or not isinstance(doc, str) or not wanted(value):
            continue
        inner = []
        if inspect.isclass(value) and value is not owner:
            inner = list(_live_entries(value, inspect.isroutine, seen))
        yield from _entry(_live_heading(name, value, doc), inspect.cleandoc(doc), inner, seen)


def _live_heading(name: str, value: object, doc: str) -> str:
    """Return the heading of a C object; empty when its docstring opens with one."""
    if inspect.isclass(value):
        return f"class {name}"
    if doc.startswith(name + "(") or re.match(r"\w+\." + re.escape(name) + r"\(", doc):
        return ""
    signature = getattr(value, "__text_signature__", None) or ("(...)" if callable(value) else "")
    return name + re.sub(r"\$(?:module|type)(?:, /)?(?:, )?", "", signature).replace("$", "")


def _module(
    kind: str, name: str, doc: str | None, entries: Iterator[str], seen: set[str]
) -> Iterator[Document]:
    """Yield a module's document, or nothing when it says next to nothing."""
    synopsis, _, description = _fresh(doc and inspect.cleandoc(doc), seen).partition("\n")
    parts = [f"Help on {kind} {name}:"]
    if description and not description.startswith("\n"):  # the first line is no synopsis
        synopsis, description = "", f"{synopsis}\n{description}"
    parts.append("NAME\n" + indent(f"{name} - {synopsis}" if synopsis else name))
    if description.strip():
        parts.append("DESCRIPTION\n" + indent(description.strip("\n")))
    parts += entries
    text = "\n\n".join(parts) + "\n"
    if len(text) >= SHORTEST:
        yield Document(f"python {kind} {name}", text)


def _entry(heading: str, doc: str | None, inner: list[str], seen: set[str]) -> Iterator[str]:
    """Yield a heading with its docstring and members under it, unless all was said before."""
    said = _fresh(doc, seen)
    if not said and not inner:
        return
    if not heading:
        heading, _, said = said.partition("\n")
    head = f"{heading}\n{indent(said.strip(chr(10)))}" if said.strip() else heading
    yield "\n\n".join([head, *map(indent, inner)])


def _fresh(doc: str | None, seen: set[str]) -> str:
    """Return a cleaned docstring; empty when there is none or it came before."""
    said = clean(doc or "")
    key = " ".join(said.split())
    if key in seen:
        return ""
    seen.add(key)
    return said


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _is_builtin(value: object) -> bool:
    """Return whether a member of a module is a C function, or a class."""
    return inspect.isbuiltin(value) or inspect.isclass(value)
