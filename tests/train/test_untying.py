"""A model that is tied at first, and gets a head of its own on the way."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from tests.train.conftest import assert_same
from tiedgpt import GPT
from tiedgpt.cli.main import main
from tiedgpt.cli.options import parse
from tiedgpt.cli.train import Arguments
from tiedgpt.errors import UserError
from tiedgpt.train.card import exact_command
from tiedgpt.train.events import Untied
from tiedgpt.train.optim import make_optimizers, untie_in_training
from tiedgpt.train.step import train_step


@pytest.fixture
def untying(trial):
    """Make runs that are untied after three of six steps, which lies between two checkpoints."""
    return lambda name="run", config=None, **plan: trial(name, config, **{"untie_at": 3} | plan)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_the_head_begins_as_w_with_what_the_optimizer_holds_of_w(untying, rule):
    run = untying(optimizer=rule)
    plan, model = run.plan, run.objective.build().train()
    _, rules = make_optimizers(run.objective, model, plan, 0)
    batch_of = run.data.batches(plan.batch_size, plan.seed)
    for step in range(3):
        train_step(model, rules, batch_of(step), plan)
    ids = torch.from_numpy(batch_of(3)[0])
    held = {name: p for name, p in model.named_parameters()}
    before = {n: dict(r.state[p]) for n, p in held.items() for r in rules if p in r.state}
    tied = model(ids)
    groups, made = untie_in_training(run.objective, model, rules, plan)
    assert torch.equal(model(ids), tied)
    assert model.head.weight is not model.wte.weight and not model.config.tie_word_embeddings
    after = {n: r.state[p] for n, p in model.named_parameters() for r in made if p in r.state}
    assert set(after) == {*before, "head.weight"}
    for name, state in after.items():
        there = before["wte.weight" if name == "head.weight" else name]
        assert set(state) == set(there)
        assert all(torch.equal(state[key], there[key]) for key in there), name
    assert int(after["head.weight"]["step"]) == 3
    one, other = after["head.weight"]["exp_avg"], after["wte.weight"]["exp_avg"]
    assert one.data_ptr() != other.data_ptr()
    names = [str(group) for group in groups]
    assert names[0].startswith("W, which reads:") and names[1].startswith("head:")


def test_before_the_switch_all_is_as_in_a_tied_run_and_so_is_the_loss_after_it(trial, untying):
    tied, untied = trial("tied"), untying("untied")
    tied.train()
    events = untied.train()
    assert [event.step for event in events if isinstance(event, Untied)] == [3]
    losses = [[m["loss"] for m in run.metrics() if "loss" in m] for run in (tied, untied)]
    assert losses[0][:4] == losses[1][:4] and losses[0][5] != losses[1][5]
    (line,) = (line for line in untied.metrics() if "untied" in line)
    assert line["step"] == 4


@pytest.mark.parametrize("stops", [[1], [2], [3], [4], [3, 4, 5]])
@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_stopped_before_at_or_after_the_switch_it_ends_as_if_it_never_had(untying, stops, rule):
    dropout = {"embd_pdrop": 0.1}
    whole, parts = (untying(name, dropout, optimizer=rule) for name in ("whole", "parts"))
    whole.train()
    for stop in stops:
        assert parts.train(stop)[-1].step == stop
        published = parts.model()
        assert (published.head is None) == (stop <= 3) == published.config.tie_word_embeddings
    torch.manual_seed(99)
    parts.train()
    assert_same(whole, parts)


def test_the_published_model_is_untied_and_says_so(untying):
    run = untying()
    run.train()
    assert json.loads((run.run.model / "config.json").read_text())["tie_word_embeddings"] is False
    model = run.model()
    assert model.head is not None and not torch.equal(model.head.weight, model.wte.weight)


def test_a_damaged_untied_checkpoint_is_passed_over_for_a_tied_one(untying):
    whole, run = untying("whole"), untying()
    whole.train()
    run.train(stop_after=4)
    run.newest().write_bytes(run.newest().read_bytes()[:-1])
    events = run.train()
    assert events[0].step == 2 and "damaged" in events[0].notes[0]
    assert_same(whole, run)


def test_the_best_weights_may_be_tied_ones(untying, scores):
    for keep in ("best", "last"):
        scores([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        run = untying(keep, eval_every=1, patience=4 if keep == "best" else None, keep=keep)
        run.train()
        assert (run.model().head is None) == (keep == "best")


def test_an_untied_model_cannot_be_untied(trial, options):
    with pytest.raises(UserError, match="is untied already"):
        trial(config={"tie_word_embeddings": False}).make_plan(options, untie_at=0.5)


def test_the_command_leaves_a_card_and_a_record_that_tell_when(text_file, tmp_path, capsys):
    asked = ["--size", "tiny", "--tokenizer", "char", "--context", "32", "--steps", "10"]
    asked += ["--untie-at", "0.4", "--schedule", "wsd", "--cooldown", "0.3", "--batch-size", "4"]
    asked += ["--width", "64"]
    out = tmp_path / "run"
    assert main(["train", str(text_file), *asked, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "untied after 4 steps" in said.err and "step       4  untied: the head" in said.err
    assert "reads and another predicts" in said.out
    record = tomllib.loads((out / "run.toml").read_text())
    assert record["training"]["untie_at"] == 4 and record["options"]["untie_at"] == 0.4
    card = (out / "model" / "README.md").read_text()
    assert "**Untied** after 4 steps" in card and "| cooldown | 3 |" in card
    again = parse(Arguments, "train", shlex.split(exact_command(record))[2:], "").options
    for name in ("untie_at", "schedule", "cooldown", "width"):
        assert getattr(again, name) == record["options"][name], name


def test_a_fork_of_an_untied_run_is_untied(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = ["--size", "tiny", "--tokenizer", "char", "--context", "16", "--steps", "4"]
    assert main(["train", str(text_file), *shape, "--untie-at", "0.5", "--out", "one"]) == 0
    fork = ["train", str(text_file), "--fork", "one", "--steps", "2"]
    assert main([*fork, "--out", "two"]) == 0
    record = tomllib.loads(Path("two/run.toml").read_text())
    assert record["model"]["tie_word_embeddings"] is False
    assert GPT.from_pretrained("two/model").head is not None
    assert main([*fork, "--untie-at", "0.5", "--out", "three"]) == 1
