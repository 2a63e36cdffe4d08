"""A run whose small files were changed between two commands."""

import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tests.train.conftest import metrics
from tiedgpt.errors import CorruptInputError
from tiedgpt.train import TrainOptions, train
from tiedgpt.train.events import Ended, Stepped
from tiedgpt.train.plan.memory import halve_micro_batch
from tiedgpt.train.store.directory import RunDirectory, read_plan

STOPPED_AT = 5


def train_until(options: TrainOptions, out: Path, step: int | None = None) -> Ended:
    done = []
    for event in train(options, out, stop_requested=lambda: len(done) == step):
        done.extend([event] if isinstance(event, Stepped) else [])
    return event


@pytest.fixture(scope="session")
def short(text_file) -> TrainOptions:
    return TrainOptions(
        data=(str(text_file),), size="nano", tokenizer="char", context=16, batch_size=2, steps=8,
        dtype="fp32", dropout=0.1,
    )  # fmt: skip


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory, short) -> Path:
    run = tmp_path_factory.mktemp("runs") / "stopped"
    assert train_until(short, run, STOPPED_AT).step == STOPPED_AT
    return run


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory, short) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    assert train_until(short, run).finished
    return run


@pytest.fixture
def stopped(tmp_path, stopped_once) -> Path:
    """A run that stopped after step 5 of 8, with dropout."""
    return shutil.copytree(stopped_once, tmp_path / "run")


@pytest.fixture
def finished(tmp_path, finished_once) -> Path:
    """The same run to its end."""
    return shutil.copytree(finished_once, tmp_path / "run")


def set_number(run: Path, table: str, name: str, value: str) -> None:
    """Change a number in run.toml."""
    before, heading, after = (run / "run.toml").read_text().partition(f"[{table}]")
    after, n_changed = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", after, count=1)
    assert n_changed == 1
    (run / "run.toml").write_text(before + heading + after)


NUMBERS = (
    ("training", "seed", "1"),
    ("training", "lr", "0.017"),
    ("training", "weight_decay", "0.31"),
    ("training", "dtype", '"bf16"'),
    ("training", "batch_size", "3"),
    ("training", "micro_batch", "1"),
    ("training", "steps", "9"),
    ("training", "keep", '"last"'),
    ("model", "resid_pdrop", "0.11"),
    ("model", "layer_norm_epsilon", "1.1e-05"),
    ("model", "activation_function", '"gelu"'),
    ("model", "n_head", "1"),
    ("model", "n_embd", "66"),
)


@pytest.mark.parametrize(("table", "name", "value"), NUMBERS)
def test_a_changed_number_of_the_plan_or_the_config_is_named(stopped, short, table, name, value):
    set_number(stopped, table, name, value)
    with pytest.raises(CorruptInputError, match=rf"run\.toml: {name} was .* at step-000005"):
        train_until(short, stopped)


@pytest.mark.parametrize("name", ["seed", "lr", "steps"])
def test_a_finished_run_is_not_prolonged_by_a_changed_plan(finished, short, name):
    set_number(finished, "training", name, "3")
    with pytest.raises(CorruptInputError, match=rf"{name} was .* is 3"):
        train_until(replace(short, steps=11), finished)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def dangle(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


CHANGES = {
    "flipped": flip,
    "missing": Path.unlink,
    "a directory": replace_by_directory,
    "a dangling link": dangle,
    "another file too": lambda file: file.with_name("added_tokens.json").write_text("{}"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_tokenizer_is_named(stopped, short, name, change):
    CHANGES[change](stopped / "tokenizer" / name)
    with pytest.raises(CorruptInputError, match=r"tokenizer/\w+\.json is not the file") as error:
        train_until(short, stopped)
    assert f"--start {stopped / 'model'}" in str(error.value)


def test_files_of_a_system_in_the_tokenizer_are_no_change(stopped, short):
    (stopped / "tokenizer/.DS_Store").write_bytes(b"\0")
    assert train_until(short, stopped).finished


def test_a_plan_that_begins_at_the_step_of_the_checkpoint_may_differ(stopped, short):
    set_number(stopped, "training", "lr", "0.5")
    set_number(stopped, "training", "steps", "7")
    with pytest.raises(CorruptInputError, match=f"set since = {STOPPED_AT}"):
        train_until(short, stopped)
    before = metrics(stopped)
    set_number(stopped, "training", "since", str(STOPPED_AT))
    assert train_until(short, stopped).step == 7
    lines = [line for line in metrics(stopped) if "lr" in line]
    assert lines[:STOPPED_AT] == [line for line in before if "lr" in line]
    assert [line["lr"] for line in lines[STOPPED_AT:]] == pytest.approx([0.5 * 2 / 7, 0.5 / 7])


def test_a_micro_batch_that_was_halved_at_the_step_of_the_checkpoint_resumes(stopped, short):
    _, plan = read_plan(RunDirectory(stopped).read_record())
    halved = halve_micro_batch(plan, plan.since)
    for name in ("micro_batch", "eval_batches", "final_batches"):
        assert getattr(halved, name) != getattr(plan, name)
        set_number(stopped, "training", name, str(getattr(halved, name)))
    assert train_until(short, stopped).finished


def remove_origin(run: Path) -> None:
    """Leave the state of each checkpoint as it was before it had a config and a tokenizer."""
    for path in (run / "checkpoints").glob("step-*"):
        state, manifest = (
            json.loads((path / f"{n}.json").read_text()) for n in ("state", "manifest")
        )
        del state["model"], state["tokenizer"]
        text = json.dumps(state)
        manifest["state.json"] = {"bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}
        (path / "state.json").write_text(text)
        (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_whose_checkpoints_have_only_a_plan_resumes(stopped, finished_once, short):
    remove_origin(stopped)
    set_number(stopped, "training", "seed", "1")
    with pytest.raises(CorruptInputError, match="seed was 0"):
        train_until(short, stopped)
    set_number(stopped, "training", "seed", "0")
    assert train_until(short, stopped).finished
    assert metrics(stopped) == metrics(finished_once)
    one, other = (run / "model/model.safetensors" for run in (stopped, finished_once))
    assert one.read_bytes() == other.read_bytes()
