"""The model card that a run writes."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.train.conftest import TEXT
from tiedgpt.cli.main import main
from tiedgpt.train import TrainOptions, train
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.metrics import read_history
from tiedgpt.weights.formats.transformers.writer import OUR_CARD


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    (folder / "cats.txt").write_text(TEXT)
    options = ["--size", "tiny", "--steps", "20", "--context", "16", "--batch-size", "3"]
    options += ["--val", str(folder / "cats.txt"), "--score", "all"]
    (folder / "dogs.txt").write_text(TEXT.replace("cats", "dogs"))
    arguments = [str(folder / "dogs.txt"), *options, "--tokenizer", "char", "--seed", "5"]
    assert main(["train", *arguments, "--out", str(folder / "run")]) == 0
    return folder / "run"


def read_card(run: Path) -> str:
    return (run / "model" / "README.md").read_text()


def test_the_card_holds_the_tables_of_run_toml_without_paths(trained):
    card, record = read_card(trained), RunDirectory(trained).read_record()
    tables = tomllib.loads(re.search("```toml\n(.*?)```", card, re.DOTALL)[1])
    assert tables.keys() == record.keys()
    assert tables["options"] == record["options"] | {"data": ["dogs.txt"], "val": "cats.txt"}
    for name in record.keys() - {"options"}:
        assert tables[name] == record[name]
    assert str(trained.parent) not in card


def test_the_card_names_the_tie_the_parameters_and_the_scores(trained):
    card, final = read_card(trained), read_history(trained).final
    assert OUR_CARD in card and card.startswith("---\nlibrary_name: transformers\n")
    assert "**Tied**: one matrix of " in card and "counted once" in card
    assert f"loss (nats) **{final['val_loss']:.4f}**" in card
    assert f"bits per byte **{final['val_bits_per_byte']:.4f}**, on all held-out data" in card
    assert "Trained for 20 steps" in card


def test_the_card_of_a_stopped_run_has_no_score(tmp_path, text_file):
    options = TrainOptions(
        data=(str(text_file),), size="nano", context=16, steps=9, tokenizer="char"
    )
    steps = iter(range(4))
    *_, ended = train(options, tmp_path / "run", stop_requested=lambda: next(steps, None) is None)
    card = read_card(tmp_path / "run")
    assert not ended.finished and "Not scored" in card and "nats" not in card


@pytest.mark.parametrize(
    ("start", "base_model"), [("gpt2", "gpt2"), ("openai/gpt2", "openai/gpt2"), ("runs/a-1", None)]
)
def test_the_card_names_a_base_model_of_the_hub_alone(trial, trained, start, base_model):
    run, tables = trial(), RunDirectory(trained).read_record()
    tables["options"]["start"] = start
    run.run.write_record(tables)
    run.train()
    front = re.search("base_model: (.*)", read_card(run.run.path))
    assert (front and front[1]) == base_model


@pytest.mark.parametrize(("window", "name"), [(None, "AutoModelForCausalLM"), (4, None)])
def test_transformers_loads_a_model_without_a_window(trial, window, name):
    options, run = TrainOptions(size="nano", window=window), trial()
    config = options.model_config(vocab_size=11, bos=None, eos=None)
    assert run.task.publisher(config, run.data).transformers_class == name


def test_a_users_card_is_not_overwritten(trial, trained):
    run = trial()
    run.run.record.write_text((trained / "run.toml").read_text())
    run.run.model.mkdir()
    (run.run.model / "README.md").write_text("# Mine\n")
    run.train()
    assert (run.run.model / "README.md").read_text() == "# Mine\n"
