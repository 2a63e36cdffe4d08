"""Build the documentation site in build/site.

    python docs/site/build.py [--demo FILE]     # in the repository; `make docs` calls it

Zensical builds one folder of Markdown. This script first collects it in build/pages: `docs/`, and
each file elsewhere that a page links to, as another page. Notebooks become Markdown by
nbconvert, and Python files a block of code. FILE is an exported page, shown on the first page.
A broken link, an unknown name in the reference or a page outside the navigation is an error.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])|(?<=src=\")([^\"]+)|(?<=srcset=\")([^\"]+)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
DEMO = """<iframe class="demo" src="demo.html" title="A small GPT that computes in this page"
loading="lazy"></iframe>"""


def page_path(file: Path) -> Path:
    """Return the path of a repository's file in the folder of pages."""
    path = file.relative_to(DOCS if file.is_relative_to(DOCS) else ROOT)
    if path.name == "README.md":
        return path.with_name("index.md")
    return path.with_suffix(".md") if path.suffix in (".py", ".ipynb") else path


def read_markdown(file: Path) -> str:
    """Return a file as Markdown; write the figures of a notebook next to its page."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return f"# {file.name}\n\n```python\n{text}```\n"
    if file.suffix != ".ipynb":
        return text
    page = PAGES / page_path(file)
    exporter = MarkdownExporter()
    text, resources = exporter.from_filename(str(file), {"unique_key": page.stem})
    page.parent.mkdir(parents=True, exist_ok=True)
    for name, figure in resources["outputs"].items():
        (page.parent / name).write_bytes(figure)
    return text


def write_page(file: Path) -> list[Path]:
    """Write a page, its links changed to the folder of pages; return the files it links to."""
    linked: list[Path] = []
    folder = page_path(file).parent

    def follow(match: re.Match[str]) -> str:
        link = match[0]
        target = (file.parent / link).resolve()
        if "://" in link or not target.is_file() or not target.is_relative_to(ROOT):
            return link  # a link that is broken is found by Zensical
        linked.append(target)
        return Path(os.path.relpath(page_path(target), folder)).as_posix()

    text = read_markdown(file)
    if file.suffix != ".py":
        parts = CODE.split(text)
        parts[::2] = [LINK.sub(follow, prose) for prose in parts[::2]]
        text = "".join(parts)
    page = PAGES / page_path(file)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return linked


def write_pages() -> None:
    """Write all pages of docs/, and the files elsewhere that they link to."""
    shutil.rmtree(PAGES, ignore_errors=True)
    waiting = [*DOCS.rglob("*.md"), DOCS / "site" / "site.css", DOCS / "site" / "site.js"]
    written = set()
    while waiting:
        file = waiting.pop()
        if file in written:
            continue
        written.add(file)
        if file.suffix in (".md", ".py", ".ipynb"):
            waiting += write_page(file)
        else:
            copy = PAGES / page_path(file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)


def find_missing_pages() -> set[str]:
    """Return the pages that the navigation of mkdocs.yml does not name."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = yaml.safe_load(config)["nav"]
    pages = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")}
    return pages - set(re.findall(r"[\w/.-]+\.md", yaml.safe_dump(navigation)))


def main() -> None:
    """Write the pages and build the site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--demo", type=Path, help="exported page to show on the first page")
    demo = parser.parse_args().demo
    write_pages()
    if missing := find_missing_pages():
        raise SystemExit(f"add to the navigation in mkdocs.yml: {', '.join(sorted(missing))}")
    if demo:
        shutil.copy(demo, PAGES / "demo.html")
        index = PAGES / "index.md"
        index.write_text(index.read_text(encoding="utf-8").replace("<!-- demo -->", DEMO))
    builder = Path(sys.executable).with_name("zensical")
    subprocess.run([builder, "build", "--clean", "--strict"], cwd=ROOT, check=True)
    print(f"built {ROOT / 'build' / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
