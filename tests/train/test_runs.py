"""The choice of a run, prolonging a run, and `tiedgpt runs`."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import TEXT, metrics
from tiedgpt.cli.main import main
from tiedgpt.cli.source import source_or_newest
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.metrics import read_history
from tiedgpt.train.store.runs import can_generate, compare_duration, find_run

QUICK = ("--size", "tiny", "--width", "32", "--tokenizer", "char", "--context", "16")
QUICK += ("--batch-size", "2", "--dtype", "fp32")


@pytest.fixture
def folder(folder) -> Path:
    (folder / "cats.txt").write_text(TEXT)
    return folder


def train(*more):
    return main(["train", "cats.txt", *QUICK, *more])


def test_runs_are_numbered_and_more_steps_prolong_them(folder, capfd):
    assert train("--steps", "6") == 0
    assert train("--steps", "6", "--seed", "1") == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["cats-tiny-1", "cats-tiny-2"]
    assert train("--steps", "6") == 0
    assert "is finished" in capfd.readouterr().err
    first = metrics(Path("runs/cats-tiny-1"))

    assert train("--steps", "10") == 0  # the first run goes on
    assert "resuming after step 6" in capfd.readouterr().err
    assert len(list(Path("runs").iterdir())) == 2
    history = read_history(Path("runs/cats-tiny-1"))
    assert history.finished and history.step == 10
    both = metrics(Path("runs/cats-tiny-1"))
    assert both[: len(first) - 1] == first[:-1], "what was done stays"
    assert sum("final" in line for line in both) == 1
    record = tomllib.loads(Path("runs/cats-tiny-1/run.toml").read_text())
    assert record["training"]["steps"] == record["options"]["steps"] == 10
    assert record["training"]["since"] == 6 and "training_before" not in record
    losses = [line["lr"] for line in both if "lr" in line]
    assert losses[5] < losses[6] and losses[-1] < losses[6]

    assert train("--steps", "4") == 0  # fewer is another run
    assert Path("runs/cats-tiny-3").is_dir()
    Path("cats.txt").write_text(TEXT + "a dog\n")
    assert train("--steps", "6") == 0  # so is other text
    assert Path("runs/cats-tiny-4").is_dir()

    capfd.readouterr()
    assert main(["runs"]) == 0
    out = capfd.readouterr().out
    assert out.count("bits/byte") == 4 and "cats-tiny-3" in out
    assert main(["runs", "--format", "json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [run["run"] for run in listed][-1] == "runs/cats-tiny-4"
    assert listed[-1]["finished"] and listed[-1]["val_loss"] > 0
    stopped = Path("runs/cats-tiny-1/metrics.jsonl")
    lines = stopped.read_text().splitlines(keepends=True)
    stopped.write_text("".join(line for line in lines if json.loads(line)["step"] <= 7))
    assert main(["runs"]) == 0
    out = capfd.readouterr().out
    assert [line.split()[2:5] for line in out.splitlines() if " of " in line] == [["7", "of", "10"]]
    assert main(["runs", "nowhere"]) == 1


def write_run(path: Path, options: TrainOptions, architecture="GPT2LMHeadModel") -> None:
    (path / "model").mkdir(parents=True)
    run = RunDirectory(path)
    given = {name: value for name, value in vars(options).items() if value is not None}
    run.write_record({"options": given, "training": {"steps": 5}, "text": {"sha256": "abc"}})
    (path / "model" / "config.json").write_text(json.dumps({"architectures": [architecture]}))


def test_a_number_is_found_among_damaged_and_foreign_directories(folder):
    options = TrainOptions(data=("cats.txt",), size="tiny")
    assert find_run(options, "abc") == Path("runs/cats-tiny-1")
    write_run(Path("runs/cats-tiny-2"), options)
    assert find_run(options, "abc") == Path("runs/cats-tiny-2")
    assert find_run(options, "other") == Path("runs/cats-tiny-3")
    Path("runs/cats-tiny-5").mkdir()
    Path("runs/cats-tiny-5/run.toml").write_text("[broken")
    Path("runs/cats-tiny-x").mkdir()
    assert find_run(options, "abc") == Path("runs/cats-tiny-2")
    assert find_run(TrainOptions(data=("cats.txt",), size="tiny", seed=1), "abc").name[-1] == "6"


@pytest.mark.parametrize("data", ["plays", "plays/*.txt", "plays/**/*.txt"])
def test_a_run_on_a_glob_has_the_name_of_its_folder(folder, data):
    assert find_run(TrainOptions(data=(data,), size="nano"), None) == Path("runs/plays-nano-1")


def test_a_run_is_prolonged_in_one_unit():
    def times(then, now):
        tables = {"options": {k: v for k, v in vars(TrainOptions(**then)).items() if v is not None}}
        return compare_duration(TrainOptions(**now), tables)

    assert times({"steps": 10}, {"steps": 25}) == 2.5
    assert times({}, {"minutes": 6}) == 2
    assert times({"minutes": 4}, {"minutes": 6}) == 1.5
    labelled = {"task": "classify", "data": ("x.jsonl",)}
    assert times(labelled, labelled | {"epochs": 6}) == 2
    for then, now in (
        ({"steps": 10}, {"steps": 10}),
        ({"steps": 10}, {"steps": 9}),
        ({"steps": 10}, {"minutes": 60}),
        ({"steps": 10}, {"steps": 20, "seed": 1}),
    ):
        assert times(then, now) is None


def test_the_newest_run_that_can_generate_is_used(folder, capfd):
    options = TrainOptions(data=("cats.txt",), size="tiny")
    write_run(Path("runs/lm"), options)
    write_run(Path("runs/bare"), options)
    write_run(Path("runs/classify"), options, "GPT2ForSequenceClassification")
    for name in ("bare", "classify"):
        Path(f"runs/{name}/run.toml").unlink()
    assert can_generate(Path("runs/bare"))
    shutil.rmtree("runs/bare")
    assert can_generate(Path("runs/lm")) and not can_generate(Path("runs/classify"))
    assert str(source_or_newest(None, task="lm")) == "runs/lm"


def test_a_run_of_another_edition_is_refused_with_its_version(folder, capfd):
    assert train("--steps", "2", "--out", "old") == 0
    record = Path("old/run.toml")
    record.write_text(record.read_text().replace('optimizer = "muon"', "", 1))
    lines = record.read_text().splitlines()
    at = lines.index("[training]")
    lines = [line for n, line in enumerate(lines) if n < at or not line.startswith("optimizer")]
    record.write_text("\n".join(lines))
    assert train("--steps", "2", "--out", "old") == 3
    said = capfd.readouterr().err
    assert "tiedgpt 0.1.0 wrote it" in said and "--start DIRECTORY/model" in said


def test_epochs_evaluations_prompts_and_freezing_are_options(folder, capfd):
    more = ("--epochs", "0.02", "--eval-every", "3", "--sample-prompt", "line 7", "--device", "cpu")
    assert train(*more, "--freeze", "wte,h.0.attn", "--out", "run") == 0
    said = capfd.readouterr().err
    assert "line 7" in said and "21,760 of 26,816 parameters are trained" in said
    record = tomllib.loads(Path("run/run.toml").read_text())
    windows = -(-(record["train_text"]["tokens"] - 1) // 16)
    assert record["training"]["steps"] == -(-windows * 2 // 200)
    assert [line["step"] for line in metrics(Path("run")) if "sample" in line][:2] == [3, 6]
    steps = sorted(Path("run/checkpoints").glob("step-*"))
    first, last = (load_file(step / "model.safetensors") for step in steps[-2:])
    still = {name for name in last if torch.equal(first[name], last[name])}
    frozen = {name for name in last if name.startswith(("wte.", "h.0.attn."))}
    assert still == frozen and len(frozen) > 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--freeze", "hat"), "--freeze hat: no parameter has such a name: body, wte, wpe, h"),
        (("--freeze", "*,+head"), "--freeze +head: the model is tied: wte.weight reads tokens and"),
        (("--freeze", "body"), "leaves nothing to train"),
        (("--device", "cuda:99"), "--device cuda:99 cannot be used here"),
        (("--device", "toaster"), "--device must be auto, cpu, cuda, cuda:N or mps, got 'toaster'"),
        (("--encoding", "klingon"), "--encoding klingon"),
    ],
)
def test_impossible_options_are_refused_in_one_line(folder, capfd, wrong, says):
    Path("cats.txt").write_bytes(b"caf\xe9 " * 200)
    assert train("--steps", "2", *wrong) == 1
    assert says in " ".join(capfd.readouterr().err.split())
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", 1, "no text in cats.txt"),
        (b"\n\n \n", 1, "no text in cats.txt"),
        (b"\0\1\2" * 99, 3, "cats.txt contains a NUL byte at 0"),
    ],
)
def test_unusable_training_data_is_refused_in_one_line(folder, capfd, content, code, says):
    Path("cats.txt").write_bytes(content)
    assert train("--steps", "2", "--context", "64") == code
    said = " ".join(capfd.readouterr().err.split())
    assert says in said and "Traceback" not in said
