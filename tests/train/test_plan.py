import dataclasses
import tomllib

import pytest
import torch

from tiedgpt.errors import UserError
from tiedgpt.train import train
from tiedgpt.train.options import SIZES, TrainOptions
from tiedgpt.train.pace import count_final_rows, count_steps
from tiedgpt.train.sizing import make_plan
from tiedgpt.train.storage import format_toml, make_record, read_plan


def test_every_size_is_a_possible_model():
    for size in SIZES:
        config = TrainOptions(size=size).model_config(vocab_size=300, bos=None, eos=None)
        assert config.parameter_count() > 0


def test_minutes_become_steps_by_a_measurement(trial, monkeypatch):
    assert trial("measured").make_plan(TrainOptions(size="tiny", minutes=0.5)).steps > 10
    monkeypatch.setattr("tiedgpt.train.sizing.step_seconds", lambda *_, **__: 0.01)
    run, options = trial(), TrainOptions(size="tiny", minutes=0.5, batch_size=2)
    plan, longer = run.make_plan(options), run.make_plan(options, minutes=5.0)
    assert longer.steps == pytest.approx(10 * plan.steps, rel=0.1)


@pytest.mark.parametrize("seconds", [60, 600])
@pytest.mark.parametrize("held_out_rows", [10.0, 1e6])
@pytest.mark.parametrize("a_step", [0.01, 0.5])
def test_steps_fill_the_time_and_scoring_takes_little_of_it(trial, seconds, held_out_rows, a_step):
    run = trial(batch_size=16, micro_batch=16)
    data = dataclasses.replace(run.data, held_out_rows=held_out_rows)
    steps = count_steps(seconds, a_step, data, run.plan)
    last = a_step / 3 * count_final_rows(seconds, a_step, data, run.plan) / 16
    assert last <= max(0.02 * seconds, 4 * a_step / 3) + 1e-9
    assert 0.93 * seconds < steps * a_step + last < seconds


def test_the_time_that_preparing_took_is_not_trained(trial, monkeypatch):
    monkeypatch.setattr("tiedgpt.train.sizing.step_seconds", lambda *_, **__: 0.01)
    run, options = trial(), TrainOptions(size="tiny", minutes=0.5, batch_size=2)
    late, early = (
        make_plan(options, run.objective, run.data, torch.device("cpu"), spent=spent).steps
        for spent in (20.0, 0.0)
    )
    assert late == pytest.approx(early / 3, rel=0.1)


def test_what_run_toml_says_is_read_back_as_it_was(options, trial):
    run = trial()
    plan, config = run.make_plan(options), run.objective.config
    text = format_toml(make_record(options, config, plan, {"train_text": {"tokens": 5}}))
    tables = tomllib.loads(text)
    assert read_plan(tables) == (config, plan)
    assert options.differences(tables["options"]) == []
    changed = dataclasses.replace(options, lr=0.5, seed=9)
    assert changed.differences(tables["options"]) == [
        "--seed was 0 and is 9",
        "--lr was not given and is 0.5",
    ]


def test_toml_holds_any_text():
    odd = 'quotes " and \\ and\nlines and \x7f and é and 日本'
    assert tomllib.loads(
        format_toml({"t": {"a": odd, "b": [odd], "c": None, "d": True, "e": 1e-05}})
    ) == {"t": {"a": odd, "b": [odd], "d": True, "e": 1e-05}}


def test_text_shorter_than_the_context_is_refused_with_both_numbers(trial, tmp_path):
    (tmp_path / "short.txt").write_text("line 1\n" * 9)
    options = TrainOptions(
        data=(str(tmp_path / "short.txt"),), size="nano", tokenizer="char", context=64, steps=1
    )
    with pytest.raises(UserError, match=r"\d+ tokens and the context is 64"):
        list(train(options, tmp_path / "out"))
    with pytest.raises(UserError, match="validation text has 1 tokens"):
        dataclasses.replace(trial().data, held=["one token"]).require_enough()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": "huge"}, "no size 'huge'"),
        ({"minutes": 1.0, "steps": 5}, "only one of"),
        ({"minutes": -1.0}, "minutes must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"steps": 0}, "steps must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"warmup": 2.0}, "warmup must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_impossible_options_are_named(wrong, says):
    with pytest.raises(UserError, match=says):
        TrainOptions(**wrong)


def test_gpt3s_bands_and_no_biases_are_asked_for_by_name():
    options = TrainOptions(size="tiny", window=16, bias=False)
    config = options.model_config(vocab_size=97, bos=None, eos=None)
    assert config.attention_windows == (0, 16) and not config.bias
    assert TrainOptions().model_config(vocab_size=97, bos=None, eos=None).attention_windows is None
    for wrong in ({"window": 0}, {"start": "x", "window": 4}, {"start": "x", "bias": False}):
        with pytest.raises(UserError, match=r"window|-bias"):
            TrainOptions(**wrong)
