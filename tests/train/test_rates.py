"""The learning-rate finder."""

import dataclasses
import math

import pytest
import torch

from tests.train.conftest import CPU
from tiedgpt.cli.find_rate import show
from tiedgpt.errors import UserError
from tiedgpt.train.rates import BELOW_LOWEST, HIGHEST, LOWEST, Sweep, sweep
from tiedgpt.train.tasks.language import LanguageModelling


@pytest.fixture
def task(new_run, config):
    run, tokenizer = new_run()
    return LanguageModelling(run, config, tokenizer)


def test_the_rates_rise_by_a_factor_and_the_loss_falls_then_turns(task, plan):
    found = sweep(task, plan, CPU, steps=60)
    factors = [b / a for a, b in zip(found.rates, found.rates[1:], strict=False)]
    assert found.rates[0] == LOWEST
    assert factors == pytest.approx([(HIGHEST / LOWEST) ** (1 / 59)] * len(factors))
    assert len(found.rates) == len(found.losses) == len(found.smoothed)
    assert min(found.smoothed) < found.losses[0] - 0.3 < found.smoothed[-1]
    assert found.rates[5] < found.lowest < found.rates[-1]
    assert found.suggestion == pytest.approx(found.lowest / BELOW_LOWEST, rel=0.06)


def test_equal_seeds_give_equal_sweeps_and_the_random_stream_stays_as_it_was(task, plan):
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = sweep(task, plan, CPU, steps=20)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12)
    assert sweep(task, plan, CPU, steps=20) == first
    assert sweep(task, dataclasses.replace(plan, seed=4), CPU, steps=20) != first


def test_a_sweep_ends_where_the_loss_runs_away(task, plan, monkeypatch):
    monkeypatch.setattr("tiedgpt.train.rates.HIGHEST", 1e4)
    found = sweep(task, plan, CPU, steps=40)
    assert len(found.rates) < 40 and all(map(math.isfinite, found.losses))


def test_a_loss_that_is_not_finite_from_the_beginning_is_an_error(task, plan, monkeypatch):
    def broken(model):
        with torch.no_grad():
            model.wte.weight[:] = math.nan

    monkeypatch.setattr(task, "begin", broken)
    with pytest.raises(UserError, match="before the first step"):
        sweep(task, plan, CPU)


def test_the_suggestion_has_two_digits():
    assert Sweep([1e-3, 0.0385, 0.1], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0]).suggestion == 0.013


def test_what_suits_wider_models_is_told_with_its_rule(plan, capsys):
    found = Sweep([1e-3, 0.03, 0.1], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0])
    show(found, plan, 128, given=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "wider 0.0071 at 256, 0.005 at 512 (width^-0.5, the rule for muon)" in said
