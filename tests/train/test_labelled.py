"""Every head trains in the same loop: it learns, it stops and goes on, it is saved."""

import dataclasses
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.train.conftest import PLAN, Trial, assert_resumes, gradients, true_gradients, write_lines
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.heads import MultipleChoice, SequenceClassifier, pad
from tiedgpt.train.events import Ended, Evaluated
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.step.optim.groups import parameter_groups
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.labelled import LabelScore
from tiedgpt.train.tasks.registry import TASKS, TaskRecord
from tiedgpt.train.tasks.task import load_task

LABELLED = {name: load_task(TASKS[name].home) for name in ("classify", "choose")}
ANIMALS, THINGS = ("cat", "dog", "cow", "owl"), ("cup", "hat", "box", "pen")


def record(task, n):
    """Make an example that says whether a sentence is of an animal, and which."""
    alive = n % 2 == 0
    noun = (ANIMALS if alive else THINGS)[n // 2 % 4]
    text = f"{'the' if n % 3 else 'a'} {noun} no {n} is here"
    if task == "classify":
        return {"text": text, "label": "animal" if alive else "thing"}
    choices = ["it lives", "it lies", "it is"][: 2 + n % 2]
    return {"text": text, "choices": choices, "answer": 0 if alive else 1}


def open_run(path, kind, *, n=240, context=None, plan=None, **sizes):
    """Return a run on examples of a kind."""
    path.mkdir(exist_ok=True)
    lines = write_lines(path.with_name(f"{kind}.jsonl"), (record(kind, k) for k in range(n)))
    task = LABELLED[kind](TrainOptions(task=kind, data=(lines,)))
    sources = task.read()
    tokenizer = Tokenizer.characters(sources.texts()[1])
    shape = {"n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 2} | sizes
    config = GPTConfig(vocab_size=len(tokenizer), **shape, eos_token_id=tokenizer.eos_token_id)
    data = sources.rows(tokenizer, path / "data").at(context or config.n_positions)
    return Trial(RunDirectory(path), task, data, config, plan or PLAN)


@pytest.fixture
def make(tmp_path):
    return lambda kind, name="run", **more: open_run(tmp_path / name, kind, **more)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The run and the events of a training of a task that learned what there is to learn."""

    @cache
    def of(kind):
        steps = 240 if kind == "choose" else 120  # which word of two fits: neither tells it alone
        run = open_run(tmp_path_factory.mktemp(kind) / "run", kind)
        run = run.change(steps=steps, eval_every=100, batch_size=16, micro_batch=16)
        return run, run.train()

    return of


@pytest.mark.parametrize("task", ["classify", pytest.param("choose", marks=pytest.mark.slow)])
def test_a_small_problem_is_learned_to_more_than_95_percent(learned, task):
    run, events = learned(task)
    score = events[-1].score
    assert isinstance(events[-1], Ended) and isinstance(score, LabelScore)
    assert score.accuracy > 0.95 and score.nats < 1.0
    assert all(len(event.sample) > 10 for event in events if isinstance(event, Evaluated))
    lines = run.metrics()
    assert lines[-1]["final"] and lines[0]["examples"] == 16
    assert {key for key in lines[-1] if key.startswith("val_")} == {"val_loss", "val_accuracy"}


def test_the_published_classifier_says_what_it_learned(learned):
    run, _ = learned("classify")
    head = SequenceClassifier.from_pretrained(run.run.model)
    tokenizer = Tokenizer.from_pretrained(run.run.model)
    ids, lengths = pad([tokenizer.encode(text) for text in ("the owl is here", "a cup is here")])
    assert [head.labels[n] for n in head(ids, lengths).argmax(-1)] == ["animal", "thing"]


@pytest.mark.parametrize("task", LABELLED)
def test_a_resumed_run_equals_an_uninterrupted_one(make, task):
    plan = dataclasses.replace(PLAN, steps=7, save_every=3, micro_batch=3)
    more = {"n": 20, "plan": plan, "embd_pdrop": 0.2, "resid_pdrop": 0.2}
    assert_resumes(lambda name: make(task, name, **more), 4, ("config.json", "tokenizer.json"))


@pytest.mark.parametrize("size", [8, 3])
@pytest.mark.parametrize("task", LABELLED)
def test_micro_batches_add_up_to_the_gradient_of_the_batch(make, task, size):
    run = make(task, n=40)
    model = run.build().eval()
    batch = run.data.batches(8, 0)(0)
    summed = gradients(model, batch, size, run.task, batch_size=8, grad_clip=1e9)
    expected = true_gradients(model, model.loss(*map(torch.from_numpy, batch)))
    torch.testing.assert_close(summed, expected, atol=1e-6, rtol=1e-4)


def test_an_epoch_visits_every_example_once(make):
    data = make("classify", n=50).data  # 45 to train on
    batch = data.batches(9, 3)
    rows = (row for step in range(5) for row in zip(*batch(step)[:2], strict=True))
    seen = [tuple(ids[:length]) for ids, length in rows]
    assert len(seen) == len(set(seen)) == 45
    (ids, *_), (again, *_), (other, *_) = batch(3), data.batches(9, 3)(3), data.batches(9, 8)(3)
    assert (ids == again).all()
    assert ids.shape != other.shape or (ids != other).any()


@pytest.mark.parametrize("task", LABELLED)
def test_the_evaluation_is_the_loss_of_the_whole_validation_set(make, task):
    run = make(task, n=70)
    model = run.build()
    (arrays,) = run.data.held_out(100, None)
    whole = float(model.eval().loss(*map(torch.from_numpy, arrays)).detach())
    model.train()
    score = run.score(model, 2)
    assert score.nats == pytest.approx(whole, rel=1e-5)
    assert len(run.data.validation) == len(arrays[0]) == 7
    assert model.training


@pytest.mark.parametrize("kind", [SequenceClassifier, MultipleChoice])
def test_every_parameter_of_a_head_is_in_exactly_one_group(tiny, kind):
    labels = {"labels": ["a", "b"]} if kind is SequenceClassifier else {}
    model = kind(tiny, **labels)
    groups = parameter_groups(model, matrices="muon", weight_decay=0.1)
    grouped = [parameter for group in groups for parameter in group.parameters.values()]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    names = {group.name: list(group.parameters) for group in groups}
    assert names["head"] == list(kind.head_tensors)
    reads = "W, which reads and predicts" if kind is MultipleChoice else "W, which reads"
    assert names[reads] == ["gpt.wte.weight"]


def test_examples_that_do_not_fit_are_cut_or_dropped_and_counted(make, tmp_path):
    assert any("cut 54 of 54" in note for note in make("classify", n=60, context=12).data.notes)
    with pytest.raises(UserError, match=r"context of 1 token\b"):
        make("choose", n=20, context=1)


# The command line


@pytest.fixture
def files(folder) -> Path:
    for task in LABELLED:
        write_lines(Path(f"{task}.jsonl"), (record(task, k) for k in range(80)))
    text = "".join(record("classify", k)["text"] + ", it lives\n" for k in range(400))
    Path("text.txt").write_text(text)
    return folder


QUICK = ["--size", "tiny", "--context", "40", "--batch-size", "4", "--steps", "3"]


@pytest.mark.parametrize("task", LABELLED)
def test_train_a_head_from_the_command_line(files, capfd, task):
    command = ["train", f"{task}.jsonl", "--task", task, *QUICK, "--tokenizer", "char"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert "validation loss" in out and "accuracy " in out
    assert f"from runs/{task}-{task}-1".split()[1] in out
    assert "examples" in err
    answers = {"classify": "(?:animal|thing)", "choose": "choice [01]"}
    (share,) = re.findall(rf"always {answers[task]} has an accuracy of ([\d.]+)", out)
    assert 0.5 <= float(share) < 1
    assert f"tiedgpt eval runs/{task}-{task}-1 LABELLED.jsonl" in out
    command_line = next(line for line in out.splitlines() if "tiedgpt classify" in line)
    assert f"runs/{task}-{task}-1" in command_line
    assert main(shlex.split(command_line.partition("tiedgpt ")[2])) == 0
    capfd.readouterr()
    tables = tomllib.loads(Path(f"runs/{task}-{task}-1/run.toml").read_text())
    assert tables["options"]["task"] == task and tables["train_examples"]["examples"] == 72
    assert main(command) == 0
    err = capfd.readouterr().err
    assert "is finished" in err and f"classify runs/{task}-{task}-1" in err
    assert {"classify": "labels texts", "choose": "chooses continuations"}[task] in err
    lines = Path(f"{task}.jsonl")
    lines.write_text(lines.read_text() + json.dumps(record(task, 99)) + "\n")
    assert main([*command, "--out", f"runs/{task}-{task}-1"]) == 1
    assert "has changed since" in capfd.readouterr().err


def test_start_from_a_trained_gpt_takes_its_weights_tokenizer_and_shape(files, capfd):
    assert main(["train", "text.txt", *QUICK, "--tokenizer", "char", "--out", "language"]) == 0
    for task in ("lm", "choose", "classify"):
        data = "text.txt" if task == "lm" else f"{task}.jsonl"
        start = ["--task", task, "--start", "language", "--out", task, "--lr", "1e-12"]
        quick = [*start, *QUICK[4:], "--context", "30", "--weight-decay", "0"]
        assert main(["train", data, *quick]) == 0
        capfd.readouterr()
    before = GPT.from_pretrained("language")
    same = SequenceClassifier.from_pretrained("classify/model").gpt
    assert same.config == before.config
    for gpt in (
        GPT.from_pretrained("lm"),
        MultipleChoice.from_pretrained("choose/model").gpt,
        same,
    ):
        for name, parameter in before.state_dict().items():
            torch.testing.assert_close(gpt.state_dict()[name], parameter, atol=1e-9, rtol=1e-6)
    tokenizers = [Path(f"{run}/model/tokenizer.json").read_text() for run in ("language", "choose")]
    assert tokenizers[0] == tokenizers[1]
    record = tomllib.loads(Path("classify/run.toml").read_text())
    assert record["options"]["start"] == "language" and record["training"]["optimizer"] == "adamw"
    assert main(["train", "classify.jsonl", "--task", "choose", "--out", "classify"]) == 1
    assert "--task was classify and is choose" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--task", "classify"], 1, "needs examples"),
        (["text.txt", "--task", "classify"], 3, r"text\.txt:1: not a JSON object"),
        (["choose.jsonl", "--task", "classify"], 3, r"choose\.jsonl:1: no value .* 'label'"),
        (["classify.jsonl", "--task", "classify", "--text-field", "t"], 1, "--text-field"),
        (["text.txt", "--start", "no/such/model"], 1, "no/such/model"),
        (["text.txt", "--start", "x", "--size", "small"], 1, "--size is for a fresh"),
        (["text.txt", "--start", "x", "--vocab-size", "300"], 1, "--vocab-size is for a fresh"),
        (["choose.jsonl", "--task", "choose", "--context", "1"], 1, "context"),
        (["text.txt", "--task", "swim"], 2, "swim"),
    ],
)
def test_bad_input_gets_one_line_and_its_exit_code(files, capfd, arguments, code, says):
    try:
        got = main(["train", *arguments, "--tokenizer", "bpe", "--steps", "1"])
    except SystemExit as stop:
        got = stop.code
    err = capfd.readouterr().err
    assert got == code, err
    assert re.search(says, err), err
    assert not list(files.glob("runs/*/model"))


def test_a_new_task_is_one_record(monkeypatch):
    monkeypatch.setitem(TASKS, "sort", TaskRecord(home="sorting:Sort"))
    assert TrainOptions(task="sort", data=("a.jsonl",)).task_record.home == "sorting:Sort"
    with pytest.raises(UserError, match=r"must be one of lm, classify, .*sort"):
        TrainOptions(task="swim", data=("a.jsonl",))


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "a.jsonl", "--from"],
        ["tune", "b.jsonl", "--from"],
        ["train", "a.jsonl", "--task", "classify", "--start"],
    ],
)
def test_a_trained_head_that_is_not_used_is_noted(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", (record("classify", n) for n in range(24)))
    pairs = ({"prompt": "the cat", "completion": f" no {n}"} for n in range(24))
    write_lines(tmp_path / "b.jsonl", pairs)
    tokenizer = Tokenizer.train(["the cat no 1 is here"], 270)
    config = GPTConfig(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=8,
        n_layer=1,
        n_head=1,
        eos_token_id=tokenizer.eos_token_id,
    )
    SequenceClassifier(GPT(config), labels=["a", "b"]).save_pretrained("labels")
    tokenizer.save_pretrained("labels")
    assert main([*arguments, "labels", "--steps", "1", "--out", "run"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "labels has a trained head (score.weight), which is not used" in err
