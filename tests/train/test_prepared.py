"""Training on prepared directories, and on large texts, which training prepares itself."""

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.conftest import write_lines
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import plan_preparation, prepare_data
from tiedgpt.data import prepare as preparation
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.train import TrainOptions, train
from tiedgpt.train.events import AlreadyFinished, Encoded, Ended
from tiedgpt.train.tasks import texts

TEXTS = [f"Document {n} says that {n} times {n} is {n * n}." for n in range(400)]
TINY = {"size": "nano", "context": 16, "batch_size": 2, "steps": 2, "dtype": "fp32"}


@pytest.fixture
def text(folder, monkeypatch) -> Path:
    monkeypatch.setattr(preparation, "MIN_PART_BYTES", 4000)
    return Path(write_lines(folder / "text.jsonl", ({"text": each} for each in TEXTS)))


@pytest.fixture
def large(text, monkeypatch) -> Iterator[Path]:
    """The same text, which counts as large."""
    for module in (preparation, texts):
        monkeypatch.setattr(module, "LARGE_BYTES", 1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield text
    os.sched_setaffinity(0, cores)


def run(out: str, *data: object, **options) -> object:
    chosen = TINY | options
    return [*train(TrainOptions(data=tuple(map(str, data)), **chosen), out)][-1]


def test_a_prepared_directory_is_trained_on_with_its_own_tokenizer(text, tmp_path):
    encoded = prepare_data(plan_preparation([str(text)]), tmp_path / "data", vocab_size=300)
    assert isinstance(run("run", tmp_path / "data"), Ended)
    ours, theirs = (Tokenizer.from_pretrained(p) for p in ("run/tokenizer", "data/tokenizer"))
    assert ours.to_json() == theirs.to_json()
    record = (tmp_path / "run" / "run.toml").read_text()
    assert f"tokens = {encoded.train.tokens}" in record
    assert not (tmp_path / "run" / "data").exists()
    assert isinstance(run("run", tmp_path / "data"), AlreadyFinished)
    ended = run("tuned", tmp_path / "data", start="run/model", size="auto")
    assert isinstance(ended, Ended)


@pytest.mark.parametrize(
    ("options", "option"), [({"val": "text.jsonl"}, "val"), ({"text_field": "body"}, "text_field")]
)
def test_options_decided_by_the_preparation_are_refused(text, options, option):
    prepare_data(plan_preparation([str(text)]), "data", "char")
    with pytest.raises(UserError, match="was decided when data was prepared") as caught:
        run("run", "data", **options)
    assert caught.value.options == (option,)


def test_a_directory_that_is_not_complete_and_another_tokenizer_are_refused(text, tmp_path):
    prepare_data(plan_preparation([str(text)]), "begun", "char", task=(1, 2))
    with pytest.raises(UserError, match="begun is not complete"):
        run("run", "begun")
    prepare_data(plan_preparation([str(text)]), "data", "char")
    Tokenizer.train(TEXTS, 300).save_pretrained("other")
    with pytest.raises(UserError, match="another tokenizer than that of other"):
        run("run", "data", tokenizer="other")
    with pytest.raises(UserError, match="trained on alone"):
        run("run", "data", text)
    assert not (tmp_path / "run").exists()


def test_a_shard_that_lost_tokens_is_refused(text, tmp_path):
    prepare_data(plan_preparation([str(text)]), "data", "char")
    next(Path("data").glob("*/train_000000.bin")).unlink()
    assert main(["train", "data", "--out", "run", "--steps", "1", "--context", "16"]) == 3


def test_a_large_text_is_prepared_in_the_run_and_identified_by_its_date(large, tmp_path):
    assert isinstance(run("run", large), Ended)
    data = tmp_path / "run" / "data"
    assert (data / "manifest.json").exists() and (data / "000003").is_dir()
    assert isinstance(run("run", large), AlreadyFinished)
    large.write_text(large.read_text())
    with pytest.raises(UserError, match="the text has changed since"):
        run("run", large)


def interrupt(run_: str, *data: object, **options) -> None:
    """Begin a run, and interrupt it after the third part."""
    chosen = TrainOptions(data=tuple(map(str, data)), **TINY | options)
    events = train(chosen, run_)
    encoded = (event for event in events if isinstance(event, Encoded))
    assert len([*itertools.islice(encoded, 4)]) == 4
    events.close()


def test_an_interrupted_preparation_continues_with_the_same_options(large, tmp_path):
    interrupt("run", large)
    kept = tmp_path / "run" / "data" / "000001" / "train_000000.bin"
    before = kept.stat().st_ino
    assert isinstance(run("run", large), Ended)
    assert kept.stat().st_ino == before, "the part was encoded once"
    run("whole", large)
    manifests = [tmp_path / name / "data" / "manifest.json" for name in ("run", "whole")]
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in manifests}) == 1
    interrupt("other", large)
    assert isinstance(run("other", large, tokenizer="char"), Ended)
    assert Tokenizer.from_pretrained("other/data/tokenizer").kind == "char"
    interrupt("small", large)
    Path("small.txt").write_text("\n".join(TEXTS))
    texts.LARGE_BYTES = 10**9
    assert isinstance(run("small", "small.txt"), Ended)
    data = tmp_path / "small" / "data"
    assert (data / "manifest.json").exists() and not (data / "prepared.json").exists()


def test_text_whose_characters_are_split_is_noted(folder, capsys):
    letters = [chr(0x4E00 + n * n % 3001) for n in range(6000)]
    Path("zh.txt").write_text("".join(letters))
    options = ["--size", "nano", "--context", "8", "--steps", "1", "--batch-size", "2"]
    assert main(["train", "zh.txt", "--out", "run", *options]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "of the characters have no token of their own" in err
    assert "--tokenizer char" in err and "--vocab-size" in err
    assert main(["train", "zh.txt", "--out", "char", "--tokenizer", "char", *options]) == 0
    assert "no token of their own" not in capsys.readouterr().err


def test_training_file_that_also_validates_is_noted(folder, capsys):
    for name in "ab":
        Path(f"{name}.txt").write_text(" ".join(f"{name}{n}" for n in range(99)))
    options = ["--size", "nano", "--context", "8", "--steps", "1", "--batch-size", "2"]
    command = ["train", "a.txt", "b.txt", "--val", "a.txt", "--tokenizer", "char", *options]
    assert main([*command, "--out", "run"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "1 document is also in --val and not trained on: a.txt" in err


def test_damaged_file_of_a_prepared_directory_is_named(text):
    prepare_data(plan_preparation([str(text)]), "data", "char")
    shard = next(Path("data").glob("*/val_000000.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(CorruptInputError, match=f"{shard} is missing or has changed"):
        run("run", "data")
    manifest = Path("data/manifest.json")
    manifest.write_text(manifest.read_text().replace('"tokens": ', '"tokens": 1', 1))
    with pytest.raises(CorruptInputError, match=r"manifest\.json is damaged"):
        run("run", "data")
