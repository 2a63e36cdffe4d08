import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.train.conftest import metrics
from tiedgpt.cli.main import main
from tiedgpt.train.checkpoint import list_checkpoints
from tiedgpt.weights.containers import SafetensorsFile

SHAPE = ("--size", "tiny", "--tokenizer", "char", "--context", "16")
QUICK = ("--steps", "6", "--dtype", "fp32")


def checkpoint(run: str, which: int) -> Path:
    return list_checkpoints(Path(run) / "checkpoints")[which]


def tensor(path: Path, name: str, file: str = "model"):
    return SafetensorsFile.open(path / f"{file}.safetensors").read(name)


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory) -> Path:
    """A run of six steps, to be copied."""
    out = tmp_path_factory.mktemp("forked") / "one"
    command = ["train", str(text_file), *SHAPE, *QUICK, "--batch-size", "2", "--out", str(out)]
    assert main(command) == 0
    return out


@pytest.fixture
def one(text_file, trained, tmp_path, monkeypatch) -> str:
    """A run of six steps is in `one`; return its text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "one")
    return str(text_file)


def test_other_options_are_refused_field_by_field_and_fork_is_named(one, capsys):
    assert main(["train", one, *SHAPE, *QUICK, "--batch-size", "3", "--out", "one"]) == 1
    said = capsys.readouterr().err
    assert "--batch-size was 2 and is 3" in said and "--fork one" in said


def test_a_fork_begins_with_weights_and_optimizer_and_anew_with_the_steps(one, monkeypatch):
    command = ["train", one, "--fork", "one", "--steps", "4", "--lr", "1e-4", "--out", "two"]
    from tiedgpt.train import loop as trainer

    train_step = trainer.train_step
    with monkeypatch.context() as patch:  # killed before its first step
        patch.setattr(
            trainer, "train_step", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert main([*command, "--dtype", "fp32"]) == 75
    assert trainer.train_step is train_step
    begun, there = checkpoint("two", 0), checkpoint("one", -1)
    assert begun.name == "step-000000" and there.name == "step-000006"
    for file in ("model", "optimizer"):
        stored = SafetensorsFile.open(there / f"{file}.safetensors")
        for name in stored.entries:
            if not name.startswith("random/"):
                assert tensor(begun, name, file).equal(stored.read(name)), name
    record = tomllib.loads(Path("two/run.toml").read_text())
    assert record["fork"]["step"] == 6 and record["fork"]["run"].endswith("/one")
    assert record["training"]["batch_size"] == 2  # as there
    assert record["options"]["fork"] == "one" and record["training"]["lr"] == 1e-4
    Path("one").rename("gone")  # it is no longer needed
    assert main([*command, "--dtype", "fp32"]) == 0
    assert [line["step"] for line in metrics(Path("two")) if "loss" in line] == [1, 2, 3, 4]
    assert tensor(checkpoint("two", -1), "wte.weight/step", "optimizer") == 10


def test_moments_of_another_rule_are_left_out(one, capsys):
    command = ["train", one, "--fork", "one", *QUICK, "--optimizer", "adamw", "--out", "two"]
    assert main(command) == 0
    assert "optimizer's state of 20 of 28 parameters" in capsys.readouterr().err
    matrix = "h.0.attn.c_attn.weight"
    assert tensor(checkpoint("two", -1), f"{matrix}/step", "optimizer") == 6
    assert tensor(checkpoint("two", -1), "wte.weight/step", "optimizer") == 12


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--fork", "nowhere"], "no run with a checkpoint"),
        (["--fork", "one/run.toml"], "no run with a checkpoint"),
        (["--fork", "one", "--start", "one"], "give one of them"),
        (["--fork", "one", "--size", "small"], "is for a fresh model"),
        (["--fork", "one", "--context", "64"], "has 16 positions"),
        (["--fork", "one", "--task", "classify"], "--start one/model"),
    ],
)
def test_a_fork_that_cannot_be_is_one_line(one, wrong, says, capsys):
    data = one
    if "classify" in wrong:
        data = "lines.jsonl"
        lines = [{"text": f"{n} cats", "label": "ab"[n % 2]} for n in range(40)]
        Path(data).write_text("\n".join(map(json.dumps, lines)))
    assert main(["train", data, *wrong, *QUICK, "--out", "two"]) == 1
    assert says in capsys.readouterr().err
    assert not Path("two").exists()


@pytest.mark.parametrize("option", [("--window", "4"), ("--no-bias",)])
def test_a_fork_has_the_blocks_of_its_run(one, option, capsys):
    assert main(["train", one, "--fork", "one", *option, "--steps", "2", "--out", "two"]) == 1
    assert "is for a fresh model: one has its own" in capsys.readouterr().err
