import subprocess
import sys

import pytest

from tiedgpt.data import plan_split, python_documentation
from tiedgpt.data.python_docs import clean

FINGERPRINT = """
import hashlib, sys
from tiedgpt.data import python_documentation
text = "".join(d.name + d.text for d in python_documentation())
unwanted = {"torch", "numpy.random._mt", "tkinter", "idlelib", "antigravity"} & set(sys.modules)
print(hashlib.sha256(text.encode()).hexdigest(), sorted(unwanted))
"""


@pytest.fixture(scope="module")
def corpus():
    return {document.name: document.text for document in python_documentation()}


def test_the_text_is_megabytes_of_ascii_prose(corpus):
    text = "".join(corpus.values())
    assert 1_500_000 < len(text) < 8_000_000
    assert text.isascii()
    assert set(text) <= {"\n", *map(chr, range(32, 127))}
    assert sum(map(str.isalpha, text)) > 0.6 * len(text)


def test_names_are_unique_and_no_text_comes_twice(corpus):
    assert len(corpus) == len(python_documentation())
    assert len(set(corpus.values())) == len(corpus)


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("heapq", "heapq - Heap queue algorithm (a.k.a. priority queue).\n\nDESCRIPTION\n    H"),
        ("collections", "collections\n\nDESCRIPTION\n    This module implements specialized "),
        ("textwrap", "textwrap - Text wrapping and filling.\n\nclass TextWrapper\n    Object for "),
    ],
)
def test_a_module_begins_with_its_name_synopsis_and_description_as_in_help(corpus, name, begins):
    text = corpus[f"python module {name}"]
    assert text.startswith(f"Help on module {name}:\n\nNAME\n    {begins}")


def test_a_module_reads_like_help(corpus):
    text = corpus["python module textwrap"]
    assert "\n\ndedent(text)\n    Remove any common leading whitespace from every line" in text
    assert "\n\n    wrap(self, text)\n        " in text
    assert "_wrap_chunks(self" not in text


def test_the_text_has_the_language_reference_and_the_built_ins(corpus):
    assert 'The "while" statement is used for repeated execution' in "".join(
        text for name, text in corpus.items() if name.startswith("python topic")
    )
    builtins = corpus["python built-in module builtins"]
    assert "\n\nabs(x, /)\n    Return the absolute value" in builtins
    assert "\n\nclass dict\n    dict() -> " in builtins and "\n\n    as_integer_ratio(" in builtins
    assert corpus["python built-in module math"].startswith("Help on built-in module math:")


def test_the_text_has_no_licences_and_no_sphinx_roles(corpus):
    text = "".join(corpus.values()).lower()
    for unwanted in ("copyright", "all rights reserved", ":class:`", ":meth:`"):
        assert unwanted not in text


def test_a_tenth_of_its_documents_is_held_out(corpus):
    split = plan_split(python_documentation())
    val = sum(len(document.text) for side, document in split if side == "val")
    assert not split.is_cut
    assert 0.09 < val / split.characters < 0.16


@pytest.mark.slow
def test_two_processes_make_the_same_text_without_a_warning_and_import_no_torch():
    command = [sys.executable, "-W", "error", "-c", FINGERPRINT]
    options = {"capture_output": True, "text": True, "check": True}
    found = [subprocess.run(command, env={"PYTHONHASHSEED": seed}, **options) for seed in "12"]
    assert found[0].stdout == found[1].stdout
    assert found[0].stdout.endswith(" []\n")
    assert found[0].stderr == ""


@pytest.mark.parametrize(
    ("noisy", "quiet"),
    [
        ("Use ``len(x)`` or :func:`~os.path.join`.", 'Use "len(x)" or "os.path.join".'),
        ("“Curly” — it’s", '"Curly" -- it\'s'),
        ("One.\n\n\n\nTwo.   ", "One.\n\nTwo."),
        ("Title\n*****\n\nText.", "Title\n*****\n\nText."),
        ("Text.\n\n======================\n\nMore.", "Text.\n\nMore."),
        ("Kept.\n\n+----+----+\n| ab | cd |\n+----+----+", "Kept."),
        ("Kept.\n\nCopyright 1999 by Someone.", "Kept."),
        ("Kept.\n\n0x00 0x01 0x02 0x03 | 17 18 19", "Kept."),
        ("Kept.\n\nnaïve", "Kept."),
        ("x" * 120 + "\n\n" + "x" * 121, "x" * 120),
        (">>> 1 + 1\n2", ">>> 1 + 1\n2"),
        (".. versionadded:: 3.2", "New in version 3.2."),
    ],
)
def test_markup_and_tables_are_removed_and_prose_is_kept(noisy, quiet):
    assert clean(noisy) == quiet
