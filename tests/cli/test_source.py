"""The MODEL or RUN of a command: a misspelt run is answered with the nearest one."""

from pathlib import Path

import pytest

from tests.models import opinionated, save_model
from tiedgpt.cli.main import main


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two empty runs; the command reads their names only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("zh-nano-1", "poems-mini-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.toml").write_text("")
    (tmp_path / "my.txt").write_text("a b c")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "command",
    [
        "generate {}", "chat {}", "classify {} my.txt", "eval {} my.txt", "plot {}",
        "serve {} --port 0", "inspect positions {} --text a", "export {} page.html --text a",
        "explain tie {}", "convert {} out.gguf", "push {} owner/name", "tie show {}",
        "tie audit {}", "tie fix {} out", "train my.txt --start {}", "tune my.txt --from {}",
    ],
)  # fmt: skip
def test_a_misspelt_run_names_the_nearest_one(runs, capfd, command):
    assert main(command.format("runs/zh-1").split()) == 1
    err = capfd.readouterr().err
    assert "there is no run runs/zh-1" in err and "did you mean runs/zh-nano-1?" in err
    assert "looking on the Hugging Face hub" not in err


def test_a_run_without_its_folder_and_an_unknown_one_are_explained(runs, capfd):
    for command in (["tie", "audit", "zh-1"], ["eval", "zh-1", "my.txt"]):
        assert main(command) == 1
        assert "did you mean runs/zh-nano-1?" in capfd.readouterr().err
    assert main(["tie", "audit", "runs/qqqqqq"]) == 1
    err = capfd.readouterr().err
    assert "there is no run runs/qqqqqq" in err and "poems-mini-1, zh-nano-1" in err


@pytest.mark.parametrize(
    ("option", "name", "near"),
    [
        ("--tokenizer", "tokk", "tok"), ("--tokenizer", "./tokk", "./tok"),
        ("--tokenizer", "gpt-2", "gpt2"), ("--start", "gpt-2", "gpt2"),
    ],
)  # fmt: skip
def test_a_misspelt_name_is_answered_with_the_nearest_one(runs, capfd, option, name, near):
    (runs.parent / "tok").mkdir()
    assert main(["train", "my.txt", option, name, "--steps", "1"]) == 1
    assert f"did you mean {near}?" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["generate {} --prompt {}", "inspect positions {} --text {}"])
def test_a_tokenizer_that_explodes_ends_a_command_with_one_sentence(
    exploding, tmp_path, capfd, command
):
    tokenizer, text = exploding
    save_model(tmp_path, opinionated(tokenizer), tokenizer)
    assert main(command.format(tmp_path, text).split()) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err and "tokenizer.json" in err
