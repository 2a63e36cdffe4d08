"""Write the pages of the documentation that are made from the code.

    python docs/generate.py                  all pages but the lessons, in some seconds
    python docs/generate.py lessons.md       also named pages alone; the lessons train a tiny model

`tests/docs/test_generated.py` compares the pages with the code. The numbers of the lessons differ
from machine to machine; the test compares their sentences only.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiedgpt.cli.data import PARTS as DATA_VERBS
from tiedgpt.inspect.registry import INSPECTIONS

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "tiedgpt"
MADE = "<!-- Made by docs/generate.py from the code: do not edit. -->"
MODULES = {
    "tiedgpt": "GPT GPTConfig Tokenizer explain",
    "tiedgpt.core.cache": "KVCache",
    "tiedgpt.infer": "Engine GenerationConfig Generation Completion Token Scored",
    "tiedgpt.tie": "ledger audit fix tie untie replace_head resize_vocab add_tokens prune guard",
    "tiedgpt.inspect": " ".join([*INSPECTIONS, "steer"]),
    "tiedgpt.tune": "lora merge freeze save_adapter load_adapter",
    "tiedgpt.train": "train Trainer fast_training",
    "tiedgpt.train.tasks.rows": "Data Rows Sources",
    "tiedgpt.train.tasks.task": "Task",
    "tiedgpt.heads": "Head SequenceClassifier MultipleChoice "
    "FeatureExtractor pad open_head predict",
    "tiedgpt.data": "plan_preparation prepare_data verify_data",
    "tiedgpt.evaluate.texts": "score_text TextScore",
    "tiedgpt.weights": "Source register Format TokenizerFile Writer",
    "tiedgpt.weights.checkpoint": "Program",
    "tiedgpt.errors": "UserError CorruptInputError NoRoomError DivergedError CheckFailedError",
}
"""What python.md lists: names of each module that users import from."""
PARTS = {
    "inspect": [each.verb for each in INSPECTIONS.values()],
    "data": [*DATA_VERBS],
}
"""The verbs of a verb."""


@dataclass
class Found:
    """A public name: where it is defined, and its definition."""

    name: str
    file: Path
    node: ast.FunctionDef | ast.ClassDef


def command_line() -> str:
    """Return command-line.md: the help of every verb, as `tiedgpt VERB --help` prints it."""
    from tiedgpt.cli.main import VERBS

    parts = [
        f"# Command line\n\n{MADE}",
        "Every verb, as `tiedgpt VERB --help` shows it. Results go to stdout, progress and "
        "messages to stderr.\n[Troubleshooting](troubleshooting.md) explains the exit codes. "
        "`generate`, `classify`, `inspect` and `eval`\nread their text from "
        "[standard input](guides/generate.md#from-standard-input) if none is given.",
        _block(_help("--help")),
    ]
    for verb in VERBS:
        parts.append(f"## {verb}\n\n{_block(_help(verb, '--help'))}")
        for each in PARTS.get(verb, ()):
            text = _block(_help(verb, each, "--help"))
            parts.append(f"### {verb} {each}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _help(*arguments: str) -> str:
    """Return what the command line prints, 90 columns wide and without colour."""
    from tiedgpt.cli.main import main

    out, before = io.StringIO(), dict(os.environ)
    os.environ |= {"COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(list(arguments))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return out.getvalue()


def _block(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"```text\n{lines}\n```"


def python() -> str:
    """Return python.md: signatures and docstrings of the public names, read without importing."""
    parts = [
        f"# Python\n\n{MADE}",
        "Signatures and docstrings of the public names. Shapes: B batch, T positions, D width, V\n"
        "vocabulary, L layers.",
    ]
    for module, names in MODULES.items():
        links = ", ".join(f"[{name}](#{name.lower()})" for name in names.split())
        parts.append(f"## {module}\n\n{links}")
        for name in names.split():
            parts += filter(None, _described(find(module, name)))
    return "\n\n".join(parts) + "\n"


def find(module: str, name: str) -> Found:
    """Return the definition of a public name, by the imports that lead to it."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    files = path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py")
    file = next(file for file in files if file.exists())
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return Found(name, file, node)
        if isinstance(node, ast.ImportFrom) and node.module != module:
            if any((alias.asname or alias.name) == name for alias in node.names):
                return find(str(node.module), name)
    raise LookupError(f"{module} has no {name}")


def _described(found: Found) -> Iterator[str]:
    """Yield the paragraphs on a class or a function."""
    place, node = found.file.relative_to(DOCS.parent).as_posix(), found.node
    yield f"### {found.name}\n\nIn [`{place}`](../{place})."
    if isinstance(node, ast.FunctionDef):
        yield _signature(node, node.name)
        yield _text(node)
        return
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    if "__init__" in methods:
        yield _signature(methods["__init__"], node.name)
    yield _text(node)
    yield "\n".join(_fields(node))
    for name, method in methods.items():
        if not name.startswith("_") and ast.get_docstring(method):
            kinds = {ast.unparse(each) for each in method.decorator_list}
            yield f"#### {node.name}.{name}"
            if not kinds & {"property", "cached_property"}:
                yield _signature(method, name)
            yield _text(method)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each documented attribute of a class, in a docstring or as an option."""
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        default, about = field.value, None
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "option":
            arguments = [*default.args, None, None]
            default, about = arguments[0], arguments[1] and ast.literal_eval(arguments[1])
        if about is None and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            about = str(text.value.value)
        if about is not None:
            shown = f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}"
            shown += "" if default is None else f" = {ast.unparse(default)}"
            yield f"- `{shown}`: {' '.join(about.split())}"


def _signature(node: ast.FunctionDef, name: str) -> str:
    """Return `name(arguments) -> type` as a block, with an argument a line where it is long."""
    listed = _parts(ast.unparse(node.args))
    listed = listed[1:] if listed and listed[0] in ("self", "cls") else listed
    is_init = node.returns is None or node.name == "__init__"
    returned = "" if is_init else f" -> {ast.unparse(node.returns)}"
    line = f"{name}({', '.join(listed)}){returned}"
    if len(line) > 90:
        inside = "".join(f"    {part},\n" for part in listed)
        line = f"{name}(\n{inside}){returned}"
    return f"```python\n{line}\n```"


def _parts(arguments: str) -> list[str]:
    """Split a list of arguments at the commas that are in no brackets or quotes."""
    parts, depth, quoted = [""], 0, ""
    for character in arguments:
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "'\"":
            quoted = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _text(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a docstring in Markdown: blocks that are indented are code."""
    return textwrap.dedent(ast.get_docstring(node) or "").strip()


def lessons() -> str:
    """Return lessons.md: what every lesson says of the tiny model that it trains."""
    from tiedgpt.lessons import TOPICS, explain

    parts = [
        f"# Lessons\n\n{MADE}",
        "What `tiedgpt explain TOPIC` prints, here of the tiny model that it trains where there is "
        "no\nother. `tiedgpt explain TOPIC MODEL` measures the same on your model, and\n"
        '`tiedgpt.explain("tie", model).numbers` has every number by name.',
        "\n".join(f"- [{topic}](#{topic}): {about.question}" for topic, about in TOPICS.items()),
    ]
    for topic in TOPICS:
        title, _, answer = str(explain(topic)).partition("\n\n")
        question = " ".join(title.split()).removeprefix(f"{topic}: ")
        parts.append(f"## {topic}\n\n**{question}**\n\n{_block(answer)}")
    return "\n\n".join(parts) + "\n"


def checkpoint_formats() -> str:
    """Return formats.md with tables of the records of the formats."""
    from tiedgpt.weights.registry import formats

    read = [("format", "what is read", "tokenizer found with it", "may need")]
    write = [("--to", "precisions", "untied head", "GPT-1", "banded attention", "tokenizer inside")]
    for format in formats():
        needs = f"`{format.extra}`: {', '.join(format.packages)}" if format.packages else ""
        read.append((format.title, format.about, format.about_tokenizer, needs))
        if writer := format.writer:
            fields = ("tie_word_embeddings", "norm", "attention_windows")
            computed = ["yes" if writer.program.supports(field) else "no" for field in fields]
            inside = "in a directory" if writer.bundled else "no"
            inside = "yes" if writer.holds_tokenizer else inside
            write.append((format.name, ", ".join(writer.precisions), *computed, inside))
    return _with_tables("formats.md", read=read, write=write)


def coming_from() -> str:
    """Return coming-from.md with a table of the names that errors know."""
    from tiedgpt.names import NOT_HERE, OTHER_NAMES

    holders = {"GPT": "model.{}", "Tokenizer": "tokenizer.{}", "GenerationConfig": "{}"}
    names: dict[tuple[str, str], list[str]] = {}  # by the owner and the answer
    for owner, table in [*OTHER_NAMES.items(), ("GenerationConfig", NOT_HERE)]:
        is_package = owner.startswith("tiedgpt")
        holder = holders.get(owner, f"{owner}.{{}}" if is_package else f"{owner}({{}}=)")
        for name, answer in table.items():
            names.setdefault((owner, answer), []).append(f"`{holder.format(name)}`")
    rows = [("there", "here")]
    for (_, answer), others in names.items():
        text = answer.removeprefix("use ")
        rows.append((", ".join(others), f"`{text}`" if " " not in text else text))
    return _with_tables("coming-from.md", names=rows)


def _with_tables(page: str, **tables: list[tuple[str, ...]]) -> str:
    """Return a page with new tables between their comments."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, rows in tables.items():
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "|---" * len(rows[0]) + "|")
        begin, end = f"<!-- {name}: made by docs/generate.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, *lines, end + rest.partition(end)[2]])
    return text


PAGES = {
    "command-line.md": command_line,
    "python.md": python,
    "formats.md": checkpoint_formats,
    "coming-from.md": coming_from,
    "lessons.md": lessons,
}
SLOW_PAGES = ("lessons.md",)


def main(pages: list[str]) -> None:
    """Write the named pages, or all that take seconds, and print what is done."""
    if unknown := [page for page in pages if page not in PAGES]:
        raise SystemExit(f"{__doc__}\nno page {unknown[0]}; the pages are {', '.join(PAGES)}")
    for page in pages or [page for page in PAGES if page not in SLOW_PAGES]:
        print(f"docs/{page} ...", end=" ", flush=True)
        before, text = (DOCS / page).read_text(encoding="utf-8"), PAGES[page]()
        (DOCS / page).write_text(text, encoding="utf-8")
        print("unchanged" if text == before else "written")
    for page in SLOW_PAGES if not pages else ():
        print(f"docs/{page} is written if it is named: it takes minutes")


if __name__ == "__main__":
    main(sys.argv[1:])
