"""The rule of `--size auto`, as a table, and what it does with texts that are hardly texts."""

import dataclasses
import json
import random
import tomllib
from pathlib import Path

import pytest

from tests.train.conftest import CPU, reopen_trial
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import documents, encode_corpus, plan_split
from tiedgpt.errors import UserError
from tiedgpt.train import sizing
from tiedgpt.train.choice import (
    LADDER,
    MOST_PASSES,
    context,
    expected_loss,
    vocabulary,
    with_choices,
    worth,
)
from tiedgpt.train.objectives.language import open_text
from tiedgpt.train.options import SIZES, TrainOptions
from tiedgpt.train.parallel import World
from tiedgpt.train.sizing import choose_size, make_plan

SPEEDS = {"nano": 45_000, "tiny": 25_000, "little": 16_500, "mini": 5_100, "small": 1_300}
"""Tokens a second of two cores, as they were measured."""


@pytest.fixture
def choose(monkeypatch, trial):
    """Choose by these speeds for a text of so many tokens; return the plan, config and data."""

    def of(*, minutes, tokens, speed=1.0, **asked):
        run = trial()
        data = dataclasses.replace(run.data, text_tokens=tokens)
        monkeypatch.setattr(
            sizing,
            "measure_speed",
            lambda options, *_, **__: speed * SPEEDS.get(options.size, 400),
        )
        monkeypatch.setattr(sizing, "step_seconds", lambda *_, **__: 0.01)
        monkeypatch.setattr(sizing, "count_steps", lambda *_: 1000)
        asked = TrainOptions(minutes=minutes, **asked)
        config = run.objective.config
        chosen, *sized, reason, _ = choose_size(asked, run.objective, data, World(CPU))
        plan = make_plan(chosen, *sized, CPU, reason=reason)
        assert run.objective.config is config, "what was given stays as it was"
        return plan, sized[0].config, sized[1]

    return of


def test_a_tokens_worth_falls_with_every_pass():
    assert worth(500, 1000) == 500 and worth(1000, 1000) == 1000
    assert worth(4000, 1000) == pytest.approx(3361, abs=1)
    assert worth(1e9, 1000) == pytest.approx(7000)


def test_the_law_is_within_2_percent_of_what_runs_ended_with():
    """On 641,000 tokens of Python's documentation, with a vocabulary of 2,048: bits per byte."""
    for size, tokens, ended in (
        ("nano", 2.70e6, 1.7647), ("tiny", 1.54e6, 1.7264), ("little", 0.99e6, 1.7682),
        ("tiny", 4.51e6, 1.6220), ("mini", 0.41e6, 1.9514),
    ):  # fmt: skip
        assert 1.203 + expected_loss(size, tokens, 641_000) == pytest.approx(ended, rel=0.02)


@pytest.mark.parametrize(
    ("minutes", "speed", "tokens", "size"),
    [
        (0.25, 1.0, 354_000, "nano"),
        (1.0, 1.0, 641_000, "tiny"),
        (3.0, 2.3, 641_000, "little"),
        (120.0, 2.3, 50_000_000, "mini"),
        (3.0, 1.0, 20_000, "nano"),
    ],
)
def test_more_time_and_more_text_make_a_larger_model(choose, minutes, speed, tokens, size):
    assert choose(minutes=minutes, tokens=tokens, speed=speed)[0].size == size


def test_vocabulary_and_context_go_with_the_text():
    assert [vocabulary(n) for n in (30, 30_000, 300_000, 1_100_000, 2_400_000, 10**9)] == [
        384, 384, 384, 1024, 2048, 8192,
    ]  # fmt: skip
    assert [context("tiny", n) for n in (5, 25, 500, 3_000, 10**6)] == [4, 8, 16, 128, 128]


def test_what_was_asked_for_is_not_chosen(choose):
    asked = {"context": 32, "batch_size": 3, "dropout": 0.3, "lr": 0.5, "weight_decay": 0.7}
    plan, config, data = choose(minutes=3.0, tokens=600_000, **asked)
    assert (plan.batch_size, plan.lr, plan.weight_decay) == (3, 0.5, 0.7)
    assert (data.row_tokens, config.resid_pdrop) == (32, 0.3)
    assert not TrainOptions(size="tiny").chooses and not TrainOptions(steps=5).chooses


def test_a_record_says_what_was_chosen_and_why(choose):
    plan, config, data = choose(minutes=1.0, tokens=620_000)
    shape = SIZES[plan.size]
    assert (config.n_layer, config.n_embd) == (shape.n_layer, shape.n_embd)
    assert plan.reason.startswith(f"{plan.size} has the lowest expected loss of")
    assert "in 1 minute at" in plan.reason and "epoch" not in plan.reason
    assert plan.minutes == 1.0 and plan.steps == 1000
    assert not data.notes


def test_a_text_that_is_too_small_for_the_time_is_warned_of_and_not_learned_by_heart(choose):
    plan, _, data = choose(minutes=3.0, tokens=20_000)
    assert "20,000 tokens are too little text for 3 minutes" in plan.reason
    rows = plan.steps * plan.batch_size
    assert rows == pytest.approx(MOST_PASSES * data.epoch_rows, abs=plan.batch_size)
    assert "16" in plan.reason and "epochs" in plan.reason and plan.minutes is None
    assert plan.steps >= 100


def test_epochs_that_were_asked_for_are_what_is_trained(choose):
    made = {"minutes": None, "tokens": 20_000, "epochs": 2.0, "sample_prompt": "line"}
    plan, _, data = choose(**made)
    rows = plan.steps * plan.batch_size
    assert rows == pytest.approx(2 * data.epoch_rows, abs=plan.batch_size)
    assert plan.minutes is None and not data.notes and plan.reason


def test_dropout_goes_with_the_passes_and_short_runs_have_small_batches():
    many = [with_choices(TrainOptions(), "mini", n * 5e5, 500_000) for n in (1, 5, 12)]
    assert [options.dropout for options in many] == [0.0, 0.0, 0.1]
    assert with_choices(TrainOptions(), "tiny", 6e6, 500_000).dropout == 0
    many = [with_choices(TrainOptions(), "tiny", n * 1e6, 1_000_000) for n in (1, 5, 12)]
    assert [options.batch_size for options in many] == [16] * 3
    assert with_choices(TrainOptions(), "tiny", 128 * 900, 10_000).batch_size == 3


@pytest.mark.parametrize(
    "text", ["a" * 30, "one short line of thirty bytes", "é" * 15, "\n".join("xy" * 40)]
)
def test_texts_that_are_hardly_texts_are_trained_on(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(text)
    command = ["train", "text.txt", "--out", "run", "--minutes", "0.005", "--dtype", "fp32"]
    assert main(command) == 0
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    scored = [line["val_loss"] for line in lines if "val_loss" in line]
    assert last["final"] and last["val_loss"] <= min(scored) + 1e-6
    assert tomllib.loads(Path("run/run.toml").read_text())["training"]["reason"]


def test_a_text_of_a_few_bytes_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("hello")
    assert main(["train", "text.txt", "--minutes", "0.005"]) == 1
    assert "too few to learn anything" in capfd.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").glob("*/model"))


@pytest.mark.parametrize("n_bytes", [30_000, 300_000])
def test_of_a_small_text_the_weights_that_validated_best_are_published(
    n_bytes, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    words = random.Random(1).choices(
        "a cat and two old dogs sat on my mat again".split(), k=n_bytes
    )
    Path("text.txt").write_text(" ".join(words)[:n_bytes])
    rising = ("--lr", "0.4", "--warmup", "1", "--eval-every", "2", "--sample-prompt", "two old")
    quick = ("--size", "nano", "--steps", "12", "--context", "32", "--dtype", "fp32")
    assert main(["train", "text.txt", "--out", "run", *quick, *rising]) == 0
    *lines, last = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    scored = [line["val_loss"] for line in lines if "val_loss" in line] + [last["part_val_loss"]]
    assert len(scored) >= 4 and min(scored) < scored[-1]
    run = reopen_trial(Path("run"))
    part, held = (
        run.objective.score(run.model(), run.data.held_out(run.plan.micro_batch, n), None).nats
        for n in (run.plan.eval_batches, None)
    )
    assert part == pytest.approx(min(scored), abs=1e-5)
    assert held == pytest.approx(last["val_loss"], abs=1e-5)
    assert "| two old" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x1 y\n", ""),
        ("a cat. two old dogs sat\n", "two old dogs"),
        ("天地玄黄\n", "天地玄黄 天地玄黄 天"),
    ],
)
def test_the_words_that_are_proposed_are_of_the_text(tmp_path, text, words):
    (tmp_path / "text.txt").write_text(text * 40)
    tokenizer = Tokenizer.characters([text])
    encode_corpus(plan_split(documents([str(tmp_path / "text.txt")])), tokenizer, tmp_path / "data")
    found = open_text(tmp_path / "data", tokenizer, 16).find_words(tokenizer)
    assert words in found and 0 < len(found) <= 24


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("picture.txt").write_bytes(b"\x89PNG\0\0" * 20)
    assert main(["train", "picture.txt", "--out", "run", "--minutes", "0.01"]) == 3
    assert "picture.txt" in capsys.readouterr().err
    assert not Path("run/model").exists()


def test_every_size_of_the_ladder_is_larger_than_the_one_before():
    sizes = [12 * SIZES[name].n_layer * SIZES[name].n_embd ** 2 for name in LADDER]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    with pytest.raises(UserError, match="there are auto, nano, tiny, little, mini"):
        dataclasses.replace(TrainOptions(), size="huge")
