"""Links of README and docs lead somewhere; names of extras, targets, Python and options exist."""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.conftest import PAGES, ROOT
from tiedgpt.cli import data
from tiedgpt.cli.inspect import arguments_of
from tiedgpt.cli.main import EXIT_CODES, VERBS
from tiedgpt.cli.options import option_fields
from tiedgpt.errors import TiedGPTError
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.names import OTHER_NAMES
from tiedgpt.options import flag, is_argument

ALL = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")})
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in plain}


def links(path: Path) -> list[str]:
    return [a or b for a, b in LINK.findall(BLOCK.sub("", path.read_text()))]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_resolves(page):
    broken = []
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(link)
    assert not broken


def test_every_page_is_linked():
    reached = {
        (page.parent / link.partition("#")[0]).resolve() for page in ALL for link in links(page)
    }
    alone = [p for p in (ROOT / "docs").rglob("*.md") if p not in reached]
    alone += [p for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".ipynb")
              and p not in reached]  # fmt: skip
    assert not alone


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_column_of_a_table_has_a_name(page):
    headers = re.findall(r"^(\|.+\|)\n\|[ :|-]+\|$", page.read_text(), re.MULTILINE)
    assert [header for header in headers if re.search(r"\| *\|", header)] == []


def test_every_page_is_in_the_sites_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r": ([\w./-]+\.md)$", navigation, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    examples = [p for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".ipynb")]
    pages |= {f"examples/{path.stem}.md" for path in examples}
    assert pages - set(named) == set()
    assert len(named) == len(set(named))


def test_extras_and_targets_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in ALL:
        text = page.read_text()
        named = {
            name for names in re.findall(r"tiedgpt\[([\w,]+)\]", text) for name in names.split(",")
        }
        assert named <= extras.keys(), page
        commands = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        commands += "\n".join(re.findall(r"`([^`\n]+)`", text))
        assert set(re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE)) <= set(targets), page
    rows = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "quick-start.md").read_text(), re.MULTILINE
    )
    assert set(rows) == extras.keys()


def found(name: str) -> bool:
    """Whether a dotted name of the package can be imported."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            place = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        except TiedGPTError:  # a module whose extra is not installed
            return True
        for part in parts[n:]:
            place = getattr(place, part, None)
        return place is not None
    return False


TORCHRUN = (
    "--nproc-per-node --nnodes --node-rank --master-addr --master-port --max-restarts --rdzv-id "
    "--rdzv-backend --rdzv-endpoint"
)
SLURM = "--nodes --ntasks-per-node --gpus-per-node --requeue --signal --wrap"
BENCH = "--class --classes --batch --busy --peers --tokens"
OTHER_PROGRAMS = {
    **{f"bench/{name}.py": BENCH for name in ("batch", "decode", "generate", "prefill", "serve")},
    "torchrun": TORCHRUN, "#SBATCH": SLURM, "sbatch": SLURM, "hf": "--local-dir --repo-type",
    "git": "--grep",
}  # fmt: skip
"""Options of other programs, which a page may show in a command that calls the program."""
ALONE = {"--max-restarts", "--requeue", "--help"}
"""Options that the text of a page may also name outside a command."""


def find_options(text: str) -> set[str]:
    """Return the options that a page names, except those of other programs in their commands."""
    commands = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    prose = BLOCK.sub("", text)
    options = set()
    for command in [*commands, *re.findall(r"`([^`\n]+)`", prose)]:
        words = command.removeprefix("$ ").split()
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", command))
        for program in OTHER_PROGRAMS.keys() & set(words):
            named -= set(OTHER_PROGRAMS[program].split())
        options |= named
    bare = re.sub(r"`[^`\n]+`", "", prose)
    return (options | set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", bare))) - ALONE


def flags_of(verb: str, arguments: type) -> set[str]:
    """Return the flags of a verb by the class of its arguments."""
    return {flag(field) for field in option_fields(arguments, verb) if not is_argument(field)}


OF_VERBS = {verb: flags_of(verb, import_module(f"tiedgpt.cli.{verb}").Arguments) for verb in VERBS}
OF_VERBS |= {f"data {name}": flags_of(f"data {name}", part) for name, part in data.PARTS.items()}
OF_INSPECTIONS = [flags_of("inspect", arguments_of(each)) for each in INSPECTIONS.values()]
FLAGS = set().union(*OF_VERBS.values(), *OF_INSPECTIONS)


def test_names_and_options_in_the_text_exist():
    foreign = {f"{owner}.{name}" for owner, names in OTHER_NAMES.items() for name in names}
    for page in ALL:
        text = page.read_text().replace("\\\n", " ")  # commands of several lines
        names = set(re.findall(r"(?<![/\w.-])tiedgpt(?:\.[A-Za-z_]\w*)+", text))
        assert not [name for name in names - foreign if not found(name)], page
        if page.name not in ("coming-from.md", "command-line.md"):
            assert find_options(text) <= FLAGS, page


def test_options_in_messages_exist():
    """Literals of the source name options of `tiedgpt`, or those of the programs that it calls."""
    others = {*TORCHRUN.split(), "--init", "--project", "--query-gpu", "--version"}
    for path in (ROOT / "src").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w-])", "\n".join(texts)))
        assert named <= FLAGS | ALONE | others, f"{path} names options that do not exist"


def test_options_of_another_program_are_known_in_its_commands_alone():
    assert find_options("`hf download --repo-type dataset --local-dir texts`") == set()
    assert find_options("```sh\ntiedgpt train --local-dir texts\n```") == {"--local-dir"}
    assert find_options("Use `--repo-type`, or --wrap.") == {"--repo-type", "--wrap"}


def test_every_option_is_shown_in_a_guide_or_an_example():
    pages = [page for page in ALL if page.name != "command-line.md"]
    text = "".join(path.read_text() for path in [*pages, *(ROOT / "examples").glob("*.*")])
    for verb, names in OF_VERBS.items():
        shown = {name for name in names if re.search(rf"(?<![\w-]){name}(?![\w-])", text)}
        shown |= {name for name in names if f"`{name[2:].replace('-', '_')}" in text}
        assert names == shown, f"show these options of `tiedgpt {verb}` in a guide or an example"


def test_every_error_class_and_exit_code_is_explained():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    found = re.findall(r"^class (\w*(?:Error|Warning))\((.*)\)", source, re.MULTILINE)
    public = [name for name, bases in found if bases != "Exception"]
    assert not [name for name in public if name not in page]
    reference = (ROOT / "docs" / "reference" / "errors.md").read_text()
    internal = {name for name, bases in found if bases == "Exception"} - {"TiedGPTError"}
    assert not [name for name in internal if name in reference]
    assert not [code for code in EXIT_CODES if f"\n| {code} |" not in page]


def test_guides_the_readme_and_a_release_in_the_changelog_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    for section in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert section.count("\n") <= 60, section[:20]
    for guide in (ROOT / "docs" / "guides").glob("*.md"):
        n_lines = len(guide.read_text().splitlines())
        assert n_lines <= 120, f"shorten {guide.name}, or add to one of its rows: {n_lines} lines"
    text = BLOCK.sub("", (ROOT / "README.md").read_text())
    prose = [line for line in text.splitlines() if not line.startswith(("|", "<"))]
    assert len(" ".join(prose).split()) <= 1200
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", "\n".join(prose))
    longest = max(paragraphs, key=lambda paragraph: paragraph.count("\n"))
    assert longest.count("\n") < 5, longest
