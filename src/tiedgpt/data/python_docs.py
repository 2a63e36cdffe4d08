"""The default corpus: the documentation inside the user's own Python.

The language reference (`pydoc_data.topics`) and the docstrings of the standard library, laid out as
`help()` prints them. Library sources are parsed, never imported; only a fixed list of built-in
modules is imported. The text depends on the Python installation alone. Markup, tables, licences and
rare characters are removed: a tiny GPT would spend its capacity on them.
"""

import ast
import importlib
import inspect
import os
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tiedgpt.data.corpus import Document
from tiedgpt.errors import UserError
from tiedgpt.signatures import checked

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

ASCII = [*"\"\"''-", "--", "...", "->", " "]
PUNCTUATION = dict(zip(map(ord, "“”‘’–—…→\xa0"), ASCII, strict=True))
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

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Entry = tuple[str, str | None, Iterable[Any]]
"""Heading, docstring and the entries of members."""
Module = tuple[str, str, str | None, Iterable[Entry]]
"""Kind, name, docstring and entries."""


@checked
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
        documents = list(_topics())
        for category, name, doc, entries in (*_builtin_modules(), *_library_modules()):
            text = _laid_out(f"Help on {category} {name}:", name, doc, entries, seen)
            if len(text) >= MIN_CHARACTERS:
                documents.append(Document(f"python {category} {name}", text))
    if not documents:
        raise UserError(
            "this Python has no documentation of its own (no pydoc_data, no library sources)",
            hint="name text files to train on instead",
        )
    return tuple(documents)


def _topics() -> Iterator[Document]:
    """Yield the language reference without the topics that are part of a longer one."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        return
    texts = {name: clean(inspect.cleandoc(text)) for name, text in topics.items()}
    unique, seen = [], set[str]()
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        paragraphs = {p for p in texts[name].split("\n\n") if len(p) > 60}
        if paragraphs and len(paragraphs & seen) < 0.3 * len(paragraphs):
            unique.append(name)
            seen |= paragraphs
    for name in sorted(unique):
        yield Document(f"python topic {name}", texts[name] + "\n")


def _builtin_modules() -> Iterator[Module]:
    """Yield the modules written in C that this platform has."""
    for name in BUILTIN_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        yield "built-in module", name.lstrip("_"), inspect.getdoc(module), _live_entries(module)


def _library_modules() -> Iterator[Module]:
    """Yield the modules of the standard library, sorted by name."""
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
        yield "module", name, ast.get_docstring(tree), _source_entries(tree)


def _source_entries(scope: ast.Module | ast.ClassDef) -> Iterator[Entry]:
    """Yield the public classes and functions of a parsed module or class."""
    for node in scope.body:
        if isinstance(node, Definition) and re.match("[^_]|__.*__$", node.name):
            inner = _source_entries(node) if isinstance(node, ast.ClassDef) else ()
            yield _source_heading(node), ast.get_docstring(node), inner


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


def _live_entries(owner: object) -> Iterator[Entry]:
    """Yield the documented classes and functions of a live module, or methods of a class."""
    for name, value in sorted(vars(owner).items()):
        doc = getattr(value, "__doc__", None)
        is_class = inspect.isclass(value) and not inspect.isclass(owner)
        is_documented = is_class or inspect.isroutine(value)
        if is_documented and isinstance(doc, str) and not name.startswith("_"):
            inner = _live_entries(value) if is_class else ()
            yield _live_heading(name, value, doc), inspect.cleandoc(doc), inner


def _live_heading(name: str, value: object, doc: str) -> str:
    """Return the heading of a C object, or "" when its docstring begins with one."""
    if inspect.isclass(value):
        return f"class {name}"
    if re.match(r"(\w+\.)?" + re.escape(name) + r"\(", doc):
        return ""
    signature = getattr(value, "__text_signature__", None) or "(...)"
    return name + re.sub(r"\$(?:module|type)(?:, /)?(?:, )?", "", signature).replace("$", "")


def _laid_out(
    title: str, name: str, doc: str | None, entries: Iterable[Entry], seen: set[str]
) -> str:
    """Return a module's documentation as `help()` prints it."""
    synopsis, _, description = _fresh(doc, seen).partition("\n")
    if description and not description.startswith("\n"):  # the first line is not a synopsis
        synopsis, description = "", f"{synopsis}\n{description}"
    parts = [title, "NAME\n" + _indent(f"{name} - {synopsis}" if synopsis else name)]
    if description.strip():
        parts.append("DESCRIPTION\n" + _indent(description.strip("\n")))
    return "\n\n".join([*parts, *_entries(entries, seen)]) + "\n"


def _entries(entries: Iterable[Entry], seen: set[str]) -> Iterator[str]:
    """Yield headings with docstrings and members, leaving out docstrings that came before."""
    for heading, doc, inner in entries:
        members = [_indent(member) for member in _entries(inner, seen)]
        doc = _fresh(doc, seen)
        if doc or members:
            if not heading:
                heading, _, doc = doc.partition("\n")
            if doc.strip():
                heading += "\n" + _indent(doc.strip("\n"))
            yield "\n\n".join([heading, *members])


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
    """Return the ASCII prose and code of a text, without tables, rulers, licences and credits."""
    text = text.translate(PUNCTUATION).expandtabs()
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return "\n\n".join(filter(None, map(_prose, re.split(r"\n[ \n]*\n", text.strip("\n")))))


def _prose(paragraph: str) -> str:
    """Return a paragraph without rulers; "" for tables, legal notices and text beyond ASCII."""
    lines = paragraph.strip("\n").split("\n")
    lines_of_text = [line for line in lines if not RULER.match(line)]
    is_heading = len(lines) == 2 and lines_of_text == lines[:1]  # whose underline stays
    text = "\n".join(lines if is_heading else lines_of_text)
    signs = "".join("".join(lines_of_text).split())
    dull = sum(map(str.isalpha, signs)) < 0.5 * len(signs) and ">>>" not in text
    table = any(line.lstrip().startswith(("+--", "+==", "|  ")) for line in lines_of_text)
    is_prose = all(
        line.isascii() and line.isprintable() and len(line) <= 120 for line in lines_of_text
    )
    return text if signs and is_prose and not (dull or table or LEGAL.search(text)) else ""
