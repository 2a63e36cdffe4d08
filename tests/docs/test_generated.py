"""The pages written by docs/generate.py are up to date."""

import re
import runpy
from importlib import import_module

import pytest

from tests.docs.conftest import ROOT
from tiedgpt.lessons import TOPICS, explain
from tiedgpt.lessons.lesson import Lesson

HOW = "run `python docs/generate.py`"


@pytest.fixture(scope="module")
def generate():
    return runpy.run_path(str(ROOT / "docs" / "generate.py"))


def test_references_are_up_to_date(generate):
    for page, write in generate["PAGES"].items():
        if page not in generate["SLOW_PAGES"]:
            assert (ROOT / "docs" / page).read_text() == write(), f"{page}: {HOW}"


def test_names_in_the_reference_exist_and_packages_have_a_page(generate):
    for module, names in generate["MODULES"].items():
        for name in names.split():
            assert hasattr(import_module(module), name), f"{module}.{name}"
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert pages == {(f"{module}.".split(".")[1] or "tiedgpt") for module in generate["MODULES"]}


def test_generate_reports_its_files_and_writes_lessons_only_if_named(generate, capsys):
    with pytest.raises(SystemExit, match=r"python docs/generate\.py(.|\n)*no page --help"):
        generate["main"](["--help"])
    generate["main"]([])
    said = capsys.readouterr().out
    assert "docs/reference/tie.md ... unchanged" in said and "docs/lessons.md is written if" in said


@pytest.mark.parametrize("topic", TOPICS)
def test_lessons_on_the_page_have_the_current_sentences(topic, monkeypatch):
    """Numbers and words of the tiny model differ from machine to machine; sentences do not."""
    said, say = [], Lesson.say
    monkeypatch.setattr(
        Lesson, "say", lambda self, text, **values: (said.append(text), say(self, text, **values))
    )
    explain(topic)
    page = (ROOT / "docs" / "lessons.md").read_text()
    section = " ".join(page.partition(f"\n## {topic}\n")[2].partition("\n## ")[0].split())
    assert TOPICS[topic].question in section
    sentences = [re.sub(r"\\{.*?\\}", ".+?", re.escape(" ".join(text.split()))) for text in said]
    assert re.search(".*?".join(sentences), section), HOW
