"""`tiedgpt explain` as a user meets it."""

import json
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

from tests.inspect.conftest import TEXT, random_model
from tests.models import save_model
from tiedgpt import GPT, Tokenizer, explain
from tiedgpt.cli.main import main
from tiedgpt.data import Document, encode_corpus, plan_split
from tiedgpt.lessons import TOPICS


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.train([TEXT * 3], 300)
    save_model(Path("model"), random_model(vocab_size=len(tokenizer)), tokenizer)


def test_without_a_topic_each_question_has_its_command(capfd):
    assert main(["explain"]) == 0
    out = capfd.readouterr().out
    assert all(f"{n}. " in out for n in range(1, len(TOPICS) + 1))
    assert "the newest run in runs/" in " ".join(out.split())
    assert all(f"tiedgpt explain {topic}\n" in out for topic in TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_lesson_is_printed_and_its_numbers_are_json(topic, capfd):
    assert main(["explain", topic, "model", "--text", TEXT]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"{topic}: ") and "model: " in out
    assert max(map(cell_len, out.splitlines())) <= 79 and len(out.splitlines()) <= 60
    assert main(["explain", topic, "model", "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert found["topic"] == topic and found["numbers"]


def test_two_trainings_are_announced_and_their_results_are_consistent(capfd):
    assert main(["explain", "head", "model", "--text", TEXT]) == 0
    out, err = capfd.readouterr()
    assert "--train" in out and "training" not in err
    assert "tied_loss" not in explain("head", "model", text=TEXT).numbers
    assert main(["explain", "head", "model", "--text", TEXT, "--train"]) == 0
    out, err = capfd.readouterr()
    assert "training a tied tiny GPT" in err and "training an untied tiny GPT" in err
    numbers = explain("head", "model", text=TEXT, train=True).numbers
    is_better = numbers["untied_loss"] < numbers["tied_loss"]
    assert ("no contradiction" in " ".join(out.split())) == is_better


def test_the_lesson_on_norms_begins_with_its_conclusion():
    begin = explain("norms", "model", text=TEXT).blocks[0]
    assert "|" not in begin and not any(c.isdigit() for c in begin)


def test_the_newest_run_is_used_else_a_tiny_model_is_trained(tmp_path, capfd):
    assert main(["explain", "parameters"]) == 0
    out, err = capfd.readouterr()
    assert "a tiny GPT, trained just now" in out and "training a tied tiny GPT" in err
    random_model(tied=False).save_pretrained("runs/mine/model")
    (tmp_path / "runs/mine/run.toml").write_text('[options]\ntask = "lm"\n')
    assert main(["explain", "tie"]) == 0
    out, err = capfd.readouterr()
    assert "runs/mine" in out and "newest run" in err
    assert "wte.weight reads; head.weight predicts" in out and "no tokenizer" in out


def test_a_run_is_explained_on_its_own_validation_text(capfd):
    tokenizer = Tokenizer.from_pretrained("model")
    Path("model").rename("run")
    documents = [Document("a", TEXT), Document("b", TEXT[::-1])]
    encode_corpus(plan_split(documents[:1], documents[1:]), tokenizer, "run/data")
    assert main(["explain", "head", "run"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "of its run's validation text" in out
    assert "no better than new numbers" in out, "its weights are random"
    model, ids = GPT.from_pretrained("run"), torch.tensor(tokenizer.encode(TEXT[::-1])[:32])
    losses = explain("head", "run").numbers["losses"]
    expected = model.eval().loss(ids[None, :-1], ids[None, 1:])
    assert losses["W itself"] == pytest.approx(float(expected.detach()), rel=1e-4)


def test_errors_list_the_topics(capfd):
    assert main(["explain", "ties"]) == 2
    err = capfd.readouterr().err
    assert all(topic in err for topic in TOPICS)
    assert main(["explain", "model"]) == 2
    assert "the topic comes first: tiedgpt explain tie model" in capfd.readouterr().err
    assert main(["explain", "tie", "nowhere/at/all"]) == 1
    assert "nowhere" in capfd.readouterr().err
