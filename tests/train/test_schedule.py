"""What changes from step to step: the learning rate, and by which options."""

import dataclasses
import math

import pytest

from tests.train.conftest import PLAN
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.train.options import SIZES, TrainOptions
from tiedgpt.train.plan import transferred_rate
from tiedgpt.train.storage import read_plan


def rates(schedule="linear", *, steps=100, warmup=10, cooldown=0):
    shape = {"steps": steps, "warmup": warmup, "cooldown": cooldown}
    plan = dataclasses.replace(PLAN, lr=1.0, schedule=schedule, **shape)
    return [plan.rate(step) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["linear", "wsd", "cosine"])
def test_every_schedule_rises_linearly_to_its_peak_and_never_rises_again(schedule):
    made = rates(schedule, cooldown=40)
    assert made[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert max(made) == made[9] == made[10] == 1.0
    assert made[10:] == sorted(made[10:], reverse=True)


def test_linear_falls_to_nothing_after_the_last_step():
    assert rates()[-1] == pytest.approx(1 / 90)
    assert rates(warmup=0, steps=1) == [1.0]


def test_wsd_stays_at_its_peak_and_falls_linearly_to_nothing_in_the_cooldown():
    made = rates("wsd", cooldown=40)
    assert set(made[10:61]) == {1.0} and made[61] < 1
    assert made[60:] == pytest.approx([n / 40 for n in range(40, 0, -1)])
    assert set(rates("wsd", cooldown=0)[10:]) == {1.0}


def test_wsd_without_a_stable_part_is_linear():
    assert rates("wsd", cooldown=90) == pytest.approx(rates("linear"))


def test_cosine_falls_to_a_tenth_and_is_half_way_there_in_the_middle():
    made = rates("cosine")
    assert made[55] == pytest.approx(0.55)
    assert made[-1] == pytest.approx(0.1, abs=1e-3) and min(made[10:]) > 0.1


def test_shares_of_the_steps_become_steps_in_the_plan(options, trial):
    plan = trial().make_plan(options, steps=200, schedule="wsd")
    assert (plan.schedule, plan.warmup, plan.cooldown) == ("wsd", 10, 80)
    assert plan.rate(119) == plan.rate(120) == plan.lr > plan.rate(121)
    with pytest.raises(CorruptInputError, match="invalid plan"):
        dataclasses.replace(plan, schedule="steps")


@pytest.mark.parametrize(
    "damage",
    [{"minutes": 0.0}, {"minutes": math.nan}, {"lr": math.nan}, {"warmup": -5}, {"since": -1}],
)
def test_a_record_with_numbers_that_no_plan_has_is_refused(trial, options, damage):
    run = trial()
    run.write_record(options)
    tables = run.run.read_record()
    run.run.write_record(tables | {"training": tables["training"] | damage})
    with pytest.raises(CorruptInputError, match=r"run\.toml is damaged"):
        read_plan(run.run.read_record())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cooldown": 0.2}, "--schedule wsd"),
        ({"schedule": "wsd", "cooldown": 0.8, "warmup": 0.3}, "add up to more than 1"),
    ],
)
def test_shares_that_cannot_be_are_named(wrong, says):
    with pytest.raises(UserError, match=says):
        TrainOptions(**wrong)


def test_the_rate_goes_with_the_width_for_adamw_and_with_its_root_for_muon():
    assert transferred_rate(1e-3, width=128, to=512, rule="adamw") == pytest.approx(2.5e-4)
    assert transferred_rate(1e-3, width=128, to=512, rule="muon") == pytest.approx(5e-4)


def test_a_width_of_ones_own_has_more_heads_and_a_transferred_rate():
    size, options = SIZES["tiny"], TrainOptions(size="tiny", width=512)
    config = options.model_config(vocab_size=99, bos=None, eos=None)
    assert (config.n_embd, config.n_head, config.n_layer) == (512, 16, size.n_layer)
    adamw = dataclasses.replace(options, optimizer="adamw")
    rates = [each.plan_fields(config, 64, 100)["lr"] for each in (options, adamw)]
    assert rates == pytest.approx([size.lr / 2, size.lr_adamw / 4])
    for wrong in ({"width": 100}, {"start": "x", "width": 512}):
        with pytest.raises(UserError, match="--width"):
            TrainOptions(size="auto" if "start" in wrong else "tiny", **wrong)
