"""`--task regress`: a number for each text, by least squares."""

import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import GPT2ForSequenceClassification

from tests.train.conftest import PLAN, Trial, assert_resumes, gradients, write_lines
from tiedgpt import GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.heads import open_head, predict
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.regress import Regress

QUICK = ["--task", "regress", "--size", "tiny", "--context", "24", "--tokenizer", "char"]


def record(n):
    """Make an example whose number counts the stars of its text."""
    return {"text": f"no {n} has {'*' * (n % 5)}", "number": n % 5 - 1.5 if n % 2 else n % 5 - 1}


def open_run(path, n=20, **sizes):
    """Return a run on examples."""
    path.mkdir(exist_ok=True)
    lines = write_lines(path.with_name("stars.jsonl"), map(record, range(n)))
    task = Regress(TrainOptions(task="regress", data=(lines,)))
    sources = task.read()
    tokenizer = Tokenizer.characters(sources.texts()[1])
    shape = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2} | sizes
    config = GPTConfig(vocab_size=len(tokenizer), **shape, eos_token_id=tokenizer.eos_token_id)
    data = sources.rows(tokenizer, path / "data").at(config.n_positions)
    plan = dataclasses.replace(PLAN, steps=7, save_every=3, micro_batch=3)
    return Trial(RunDirectory(path), task, data, config, plan)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The run and the events of a training that learned what there is to learn."""
    run = open_run(tmp_path_factory.mktemp("regress") / "run", 240)
    run = run.change(steps=60, eval_every=50, batch_size=16, micro_batch=16)
    return run, run.train()


def test_the_error_is_far_below_that_of_the_training_mean(learned):
    run, events = learned
    score, task = events[-1].score, run.task
    assert score.rmse == pytest.approx(math.sqrt(score.nats))
    train, held_out = (
        torch.tensor([row.example.number for row in side], dtype=torch.float64)
        for side in (run.data.train, run.data.validation)
    )
    mean = float(train.mean())
    baseline = float((held_out - mean).square().mean().sqrt())
    assert score.rmse < baseline / 4
    in_words = task.publisher(run.config, run.data).show(run.run.path, run.run.model).accuracy
    assert f"always {mean:.4g}" in in_words and f"rmse of {baseline:.4f}" in in_words
    assert {k for k in run.metrics()[-1] if k.startswith("val_")} == {"val_loss", "val_rmse"}


def test_transformers_gives_the_same_numbers_and_the_same_loss(learned):
    run, events = learned
    peer = GPT2ForSequenceClassification.from_pretrained(run.run.model).eval()
    assert (peer.config.num_labels, peer.config.problem_type) == (1, "regression")
    head, tokenizer = open_head(run.run.model), Tokenizer.from_pretrained(run.run.model)
    errors = []
    for row in run.data.validation:
        (text,) = row.example.texts
        ids = torch.tensor([tokenizer.encode_document(text)])
        with torch.no_grad():
            output = peer(ids, labels=torch.tensor([row.example.number]))
        (answer,) = predict(head, tokenizer, [{"text": text}])
        assert answer == {"predicted": pytest.approx(output.logits.item(), abs=1e-5)}
        errors.append(output.loss.item())
    assert events[-1].score.nats == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    dropout = {"embd_pdrop": 0.2, "resid_pdrop": 0.2}
    files = ("config.json", "tokenizer.json")
    assert_resumes(lambda name: open_run(tmp_path / name, **dropout), 4, files)


def test_minus_100_is_a_number_like_others(tmp_path):
    run = open_run(tmp_path / "run")
    row = dataclasses.replace(run.data.validation[0], answer=-100)
    batch = run.task.collate([row, *run.data.train[:6]])
    assert run.task.n_targets(batch) == (7,)
    model = run.build().eval()
    whole, summed = (gradients(model, batch, size, run.task, batch_size=7) for size in (7, 3))
    torch.testing.assert_close(summed, whole, atol=1e-4, rtol=1e-4)


def test_train_eval_and_classify_from_the_command_line(folder, capsys):
    lines = [record(n) | ({"number": 3} if n == 7 else {}) for n in range(40)]
    write_lines(Path("stars.jsonl"), lines)
    quick = [*QUICK, "--batch-size", "4", "--steps", "3", "--out", "run"]
    assert main(["train", "stars.jsonl", *quick]) == 0
    out = capsys.readouterr().out
    assert re.search(r"rmse \d", out) and "the training mean" in out
    record_of_run = tomllib.loads(Path("run/run.toml").read_text())
    assert record_of_run["options"]["task"] == "regress"
    card = Path("run/model/README.md").read_text()
    assert "loss (squared error) **" in card and "nats" not in card
    assert main(["train", "stars.jsonl", *quick]) == 0
    assert "predicts numbers" in " ".join(capsys.readouterr().err.split())
    assert main(["classify", "run", "no 1 has *"]) == 0
    assert re.fullmatch(r"-?[\d.e-]+  no 1 has \*\n", capsys.readouterr().out)
    assert main(["classify", "run", "stars.jsonl", "--format", "json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["number"] for answer in answers] == [line["number"] for line in lines]
    errors = [answer["predicted"] - answer["number"] for answer in answers]
    write_lines(Path("labels.jsonl"), ({"text": x["text"], "label": x["number"]} for x in lines))
    for name in ("stars.jsonl", "labels.jsonl"):
        assert main(["eval", "run", name, "--format", "json"]) == 0
        output = capsys.readouterr()
        numbers = json.loads(output.out)
        assert numbers["loss"] == pytest.approx(sum(e * e for e in errors) / 40, rel=1e-4)
        assert numbers["absolute_error"] == pytest.approx(sum(map(abs, errors)) / 40, rel=1e-4)
        assert "not read" not in output.err


BAD_NUMBERS = ['"3.5"', "true", "NaN", "-Infinity", "1e19", f"1{'0' * 400}", "null"]


@pytest.mark.parametrize("number", [*BAD_NUMBERS, None])
def test_a_line_without_a_number_is_refused_with_file_and_line(learned, folder, capsys, number):
    field = "" if number is None else f', "number": {number}'
    good = '{"text": "no 1", "number": 2}'
    Path("bad.jsonl").write_text(f'{good}\n\n{{"text": "no 2"{field}}}\n')
    run, _ = learned
    for command in (["train", "bad.jsonl", *QUICK], ["eval", str(run.run.model), "bad.jsonl"]):
        assert main(command) == 3, command
        err = " ".join(capsys.readouterr().err.split())
        assert "bad.jsonl:3: " in err and "number" in err, err
        assert len(err) < 700 and "Traceback" not in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"text": " ", "number": 1}, "'text' is empty"),
        ({"number": 1}, "'text'"),
        ({"text": "a", "number": [1]}, "got [1]"),
        ({"text": "a", "label": 1}, "'number'; the record has 'text', 'label'"),
    ],
)
def test_other_wrong_lines_are_refused_with_file_and_line(folder, capsys, line, says):
    write_lines(Path("bad.jsonl"), [record(0), line])
    assert main(["train", "bad.jsonl", *QUICK]) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "bad.jsonl:2: " in err and says in err
