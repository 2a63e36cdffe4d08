"""Write the pages of the documentation that are made from the code.

    python docs/generate.py                  command-line.md, formats.md, reference/: some seconds
    python docs/generate.py lessons.md       also named pages alone; the lessons train a tiny model

`tests/docs/test_generated.py` compares the pages with the code. The numbers of the lessons differ
from machine to machine; the test compares their sentences only.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from functools import partial
from pathlib import Path

import tiedgpt.heads
from tiedgpt.cli.data import PARTS as DATA_VERBS
from tiedgpt.cli.options import HELP_COLUMN
from tiedgpt.inspect.registry import INSPECTIONS

DOCS = Path(__file__).parent
MADE = "<!-- Made by docs/generate.py from the code: do not edit. -->"
MODULES = {
    "tiedgpt": "GPT GPTConfig Tokenizer KVCache explain",
    "tiedgpt.infer": "Engine GenerationConfig Generation Completion Token Scored",
    "tiedgpt.tie": "ledger audit fix tie untie replace_head resize_vocab add_tokens prune guard",
    "tiedgpt.inspect": " ".join([*INSPECTIONS, "steer"]),
    "tiedgpt.tune": "lora merge freeze save_adapter load_adapter",
    "tiedgpt.train": "train Trainer fast_training",
    "tiedgpt.train.tasks.rows": "Data Rows Sources",
    "tiedgpt.train.tasks.task": "Task",
    "tiedgpt.heads": " ".join(tiedgpt.heads.__all__),
    "tiedgpt.data": "plan_preparation prepare_data verify_data",
    "tiedgpt.evaluate.texts": "score_text TextScore",
    "tiedgpt.weights": "Source register Format TokenizerFile Writer",
    "tiedgpt.weights.checkpoint": "Program",
    "tiedgpt.errors": "UserError CorruptInputError NoRoomError DivergedError CheckFailedError",
}
"""Names in the reference, by the module that users import them from."""
PARTS = {
    "inspect": [each.verb for each in INSPECTIONS.values()],
    "data": [*DATA_VERBS],
}
"""The verbs of a verb."""


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
    return re.sub(r"(?m)^  (-\w), (--\S+) (\S+)(?: +(.+))?$", _repeat_value, out.getvalue())


def _repeat_value(option: re.Match[str]) -> str:
    """Return `-s SIZE, --size SIZE` for the `-s, --size SIZE` of Python 3.13 and later."""
    short, long, value, text = option.groups()
    names = f"  {short} {value}, {long} {value}"
    if not text:
        return names
    fits = len(names) <= HELP_COLUMN - 2
    return f"{names:<{HELP_COLUMN}}{text}" if fits else f"{names}\n{'':{HELP_COLUMN}}{text}"


def _block(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"```text\n{lines}\n```"


def reference(package: str) -> str:
    """Return the page of a package, whose names mkdocstrings replaces by their documentation."""
    parts = [f"# {package}\n\n{MADE}"]
    if package == "tiedgpt":
        parts.append("Shapes: B batch, T positions, D width, V vocabulary, L layers.")
    own = "    options: {show_root_heading: false, show_root_toc_entry: false, members: false}"
    parts.append(f"::: {package}\n{own}")
    for module, names in MODULES.items():
        if ".".join(module.split(".")[:2]) == package:
            parts += [f"::: {module}.{name}" for name in names.split()]
    return "\n\n".join(parts) + "\n"


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
    "formats.md": checkpoint_formats,
    "coming-from.md": coming_from,
    **{
        f"reference/{package.removeprefix('tiedgpt.')}.md": partial(reference, package)
        for package in (".".join(module.split(".")[:2]) for module in MODULES)
    },
    "lessons.md": lessons,
}
SLOW_PAGES = ("lessons.md",)


def main(pages: list[str]) -> None:
    """Write the named pages, or all that take seconds, and print what is done."""
    if unknown := [page for page in pages if page not in PAGES]:
        raise SystemExit(f"{__doc__}\nno page {unknown[0]}; the pages are {', '.join(PAGES)}")
    for page in pages or [page for page in PAGES if page not in SLOW_PAGES]:
        print(f"docs/{page} ...", end=" ", flush=True)
        path, text = DOCS / page, PAGES[page]()
        before = path.read_text(encoding="utf-8") if path.exists() else None
        path.write_text(text, encoding="utf-8")
        print("unchanged" if text == before else "written")
    for page in SLOW_PAGES if not pages else ():
        print(f"docs/{page} is written if it is named: it takes minutes")


if __name__ == "__main__":
    main(sys.argv[1:])
