"""The default corpus: the documentation inside the user's own Python.

`python_documentation()` returns the language reference (`pydoc_data.topics`) and the docstrings of
the standard library, one document per topic or module, laid out as `help()` prints them. Library
sources are parsed with `ast`, never imported; only a fixed list of built-in modules is imported.
The text depends on the Python installation alone: no network, no clock, no hash seed.

Markup, tables, licences and rare characters are removed: a tiny GPT would spend its capacity on
them. Sentences, signatures and examples stay as they are.
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
MIN_CHARACTERS = 200
"""A module with less documentation is left out."""

PUNCTUATION = str.maketrans(
    {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "–": "-",
        "—": "--",
        "…": "...",
        "\xa0": " ",
        "→": "->",
    }
)
MARKUP = [
    (re.compile(r"``([^`]+)``"), r'"\1"'),
    (re.compile(r":(?:\w+:)?\w+:`[~!]?([^`<\n]+?)(?: <[^>\n]*>)?`"), r'"\1"'),
    (re.compile(r"^( *)\.\. versionadded:: *(.+)$", re.M), r"\1New in version \2."),
    (re.compile(r"^( *)\.\. versionchanged:: *(.+)$", re.M), r"\1Changed in version \2:"),
    (re.compile(r"^( *)\.\. deprecated:: *(.+)$", re.M), r"\1Deprecated since version \2."),
    (re.compile(r"^( *)\.\. (note|warning|seealso|example)::", re.M), r"\1Note:"),
    (re.compile(r"^ *\.\. [\w-]+::.*$", re.M), ""),
    (re.compile(r"^.*\$(?:Id|Revision|Date)\b.*$", re.M), ""),
    (re.compile(r"[ \t]+$", re.M), ""),
]
LEGAL = re.compile(
    r"copyright|licen[cs]e|all rights reserved|warrant(?:y|ies)|"
    r"^\W*(?:\w+ )?(?:written|contributed|maintained|implemented|created) by\b|^\W*authors?\b|"
    r"[\w.]+@[\w.]+\.(?:com|org|net|de|uk)>?\)?[.,]?$",
    re.I | re.M,
)
RULER = re.compile(r"^\s*([^\w\s])\1{3,}\s*$")
TABLE_STARTS = ("+--", "+==", "|  ")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def python_documentation() -> tuple[Document, ...]:
    """Return the documents in a fixed order: topics, built-in modules, library modules.

    No sentence of the language reference and no docstring comes twice, so a validation document is
    not also trained on. A few megabytes of ASCII; the first call in a process takes seconds.

    Raises:
        UserError: this Python has neither its topics nor the sources of its library.
    """
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old syntax and old modules of the library warn
        documents = (*_topics(), *_builtin_modules(seen), *_library_modules(seen))
    if not documents:
        raise UserError(
            "this Python has no documentation of its own (no pydoc_data, no library sources); "
            "name text files to train on instead"
        )
    return documents


def _topics() -> Iterator[Document]:
    """Yield the language reference without the topics that are part of a longer one."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        return
    texts = {name: clean(inspect.cleandoc(text)) for name, text in topics.items()}
    kept, seen = [], set[str]()
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        paragraphs = {p for p in texts[name].split("\n\n") if len(p) > 60}
        if paragraphs and len(paragraphs & seen) < 0.3 * len(paragraphs):
            kept.append(name)
            seen |= paragraphs
    for name in sorted(kept):
        yield Document(f"python topic {name}", texts[name] + "\n")


def _library_modules(seen: set[str]) -> Iterator[Document]:
    """Yield one document per module of the standard library, sorted by module name."""
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
        entries = _source_entries(tree, seen)
        yield from _module("module", name, ast.get_docstring(tree), entries, seen)


def _source_entries(scope: ast.Module | ast.ClassDef, seen: set[str]) -> Iterator[str]:
    """Yield an entry for each public class and function of a parsed module or class."""
    for node in scope.body:
        if not isinstance(node, Definition):
            continue
        if node.name.startswith("_") and not re.fullmatch("__.*__", node.name):
            continue
        inner = list(_source_entries(node, seen)) if isinstance(node, ast.ClassDef) else []
        yield from _entry(_source_heading(node), ast.get_docstring(node), inner, seen)


def _source_heading(node: Definition) -> str:
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
    """Yield one document per module written in C that this platform has."""
    for name in BUILTIN_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        entries = _live_entries(module, _is_builtin, seen)
        yield from _module("built-in module", name.lstrip("_"), module.__doc__, entries, seen)


def _is_builtin(value: object) -> bool:
    return inspect.isbuiltin(value) or inspect.isclass(value)


def _live_entries(owner: object, wanted: Callable[[object], bool], seen: set[str]) -> Iterator[str]:
    """Yield an entry for each documented member of a live module or class, sorted by name."""
    for name, value in sorted(vars(owner).items()):
        doc = getattr(value, "__doc__", None)
        if name.startswith("_") or not isinstance(doc, str) or not wanted(value):
            continue
        inner = []
        if inspect.isclass(value) and value is not owner:
            inner = list(_live_entries(value, inspect.isroutine, seen))
        yield from _entry(_live_heading(name, value, doc), inspect.cleandoc(doc), inner, seen)


def _live_heading(name: str, value: object, doc: str) -> str:
    """Return the heading of a C object, or "" when its docstring begins with one."""
    if inspect.isclass(value):
        return f"class {name}"
    if doc.startswith(name + "(") or re.match(r"\w+\." + re.escape(name) + r"\(", doc):
        return ""
    signature = getattr(value, "__text_signature__", None) or ("(...)" if callable(value) else "")
    return name + re.sub(r"\$(?:module|type)(?:, /)?(?:, )?", "", signature).replace("$", "")


def _module(
    kind: str, name: str, doc: str | None, entries: Iterator[str], seen: set[str]
) -> Iterator[Document]:
    """Yield a module's document, or nothing when it is short."""
    synopsis, _, description = _fresh(doc and inspect.cleandoc(doc), seen).partition("\n")
    parts = [f"Help on {kind} {name}:"]
    if description and not description.startswith("\n"):  # the first line is not a synopsis
        synopsis, description = "", f"{synopsis}\n{description}"
    parts.append("NAME\n" + _indent(f"{name} - {synopsis}" if synopsis else name))
    if description.strip():
        parts.append("DESCRIPTION\n" + _indent(description.strip("\n")))
    parts += entries
    text = "\n\n".join(parts) + "\n"
    if len(text) >= MIN_CHARACTERS:
        yield Document(f"python {kind} {name}", text)


def _entry(heading: str, doc: str | None, inner: list[str], seen: set[str]) -> Iterator[str]:
    """Yield a heading with its docstring and members, or nothing when the docstring came before."""
    doc = _fresh(doc, seen)
    if not doc and not inner:
        return
    if not heading:
        heading, _, doc = doc.partition("\n")
    head = f"{heading}\n{_indent(doc.strip(chr(10)))}" if doc.strip() else heading
    yield "\n\n".join([head, *map(_indent, inner)])


def _fresh(doc: str | None, seen: set[str]) -> str:
    """Return a cleaned docstring, or "" when it is missing or came before."""
    doc = clean(doc or "")
    key = " ".join(doc.split())
    if key in seen:
        return ""
    seen.add(key)
    return doc


def _indent(text: str) -> str:
    return textwrap.indent(text, "    ")


def clean(text: str) -> str:
    """Return the paragraphs of a text that are prose or code, with one blank line between them.

    Dropped are paragraphs that are not ASCII, tables, rulers, licences and credits.
    """
    text = text.translate(PUNCTUATION).expandtabs()
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    paragraphs = (_without_ruler(p) for p in re.split(r"\n[ \n]*\n", text.strip("\n")))
    return "\n\n".join(paragraph for paragraph in paragraphs if _is_worth_reading(paragraph))


def _without_ruler(paragraph: str) -> str:
    """Drop a line that only separates. The underline of a heading stays."""
    lines = paragraph.strip("\n").split("\n")
    underline = 1 if len(lines) == 2 else None
    kept = [line for i, line in enumerate(lines) if i == underline or not RULER.match(line)]
    return "\n".join(kept)


def _is_worth_reading(paragraph: str) -> bool:
    """Return whether a paragraph is ASCII prose or code, not a table or a legal notice."""
    if not paragraph.strip() or not paragraph.isascii() or LEGAL.search(paragraph):
        return False
    lines = paragraph.split("\n")
    if any(len(line) > 120 or line.lstrip().startswith(TABLE_STARTS) for line in lines):
        return False
    if not paragraph.replace("\n", "").isprintable():
        return False
    if ">>>" in paragraph:
        return True
    shown = "".join("".join(line.split()) for line in lines if not RULER.match(line))
    letters = sum(map(str.isalpha, shown))
    return letters >= 0.5 * len(shown)
