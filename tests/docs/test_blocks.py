"""Run the blocks of README and docs: Python and `$ tiedgpt` lines in one directory.

What would take minutes is made tiny first: `train` and `tune` do a few steps of the smallest size
(`shortened`). `serve`, `sh` and `yaml` blocks are only parsed; `text` is not looked at.
"""

import io
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests.docs.conftest import MADE, PAGES, ROOT
from tiedgpt.cli.main import main
from tiedgpt.cli.options import parse

BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"^```(sh|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
QUICK = {
    f"docs/guides/{name}.md"
    for name in "convert export inspect memory prepare-data scale serve tie".split()
}
"""Pages whose blocks take less than five seconds; the others are slow tests."""
PARSED = ("serve",)
"""Verbs that do not end by themselves."""
DROPPED = ("--minutes", "--steps", "--epochs", "--size", "--context", "--batch-size", "--seeds")
TINY = {
    "train": "--steps 3 --batch-size 4 --context 32".split(),
    "tune": "--steps 2 --batch-size 2".split(),
}


def pages():
    for page in PAGES:
        text, name = page.read_text(), page.relative_to(ROOT).as_posix()
        if BLOCK.search(text) and not text.partition("\n\n")[2].startswith(MADE):
            yield pytest.param(page, id=name, marks=() if name in QUICK else pytest.mark.slow)


def shortened(command: list[str]) -> list[str]:
    """Return a command that does as little as it can: fewer steps, the smallest size."""
    verb = command[0]
    if verb not in TINY:
        return command
    kept, skip = [], False
    for word in command:
        values = skip and not word.startswith("-")
        if not values:
            skip = word in DROPPED
            if not skip:
                kept.append(word)
    fresh = verb == "train" and "--start" not in command
    return [*kept, *TINY[verb], *(["--size", "nano"] if fresh else [])]


def run_shell(block: str, at: str) -> None:
    """Run the lines of a block that call tiedgpt, in this process."""
    for line in block.splitlines():
        if not line.startswith("$ tiedgpt"):
            assert not line.startswith("$ "), f"{at}: only tiedgpt is run: {line}"
            continue
        command = shlex.split(line.removeprefix("$ tiedgpt"), comments=True)
        verb = command[0]
        if verb in PARSED or "--tasks" in command:
            parse(import_module(f"tiedgpt.cli.{verb}").Arguments, verb, command[1:], "")
        else:
            assert main(shortened(command)) == 0, f"{at}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_scripts_and_yaml_are_parsed_by_their_tools(page):
    for language, block in SCRIPT.findall(page.read_text()):
        if language == "sh":
            script = block
        else:
            job = yaml.safe_load(block)
            script = f"{job.get('setup', '')}\n{job.get('run', '')}"
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.filterwarnings("ignore::tiedgpt.tie.guards.TieWarning")
@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
@pytest.mark.parametrize("page", list(pages()))
def test_the_blocks_of_a_page_run(page: Path, prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    names = {"__name__": "__main__"}
    text = page.read_text()
    for found in BLOCK.finditer(text):
        language, block = found.groups()
        line = text[: found.start()].count("\n") + 1
        at = f"{page.relative_to(ROOT)}:{line}"
        if language == "console":
            run_shell(block, at)
        else:
            exec(compile("\n" * line + block, str(page), "exec"), names)
