"""What changes from step to step: rates, batches, rows."""

import dataclasses
import json

import numpy as np
import pytest

from tests.train.conftest import CPU, train
from tests.train.trials import metrics
from tiedgpt.data import Batches
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.train.checkpoint import checkpoints
from tiedgpt.train.events import Stepped
from tiedgpt.train.history import read_history
from tiedgpt.train.options import SIZES, TrainOptions
from tiedgpt.train.plan import make_plan
from tiedgpt.train.rates import sweep
from tiedgpt.train.schedule import Growth, learning_rate, transferred_rate
from tiedgpt.train.tasks.language import LanguageModelling


def rates(schedule="linear", *, steps=100, warmup=10, cooldown=0):
    return [
        learning_rate(
            step, peak=1.0, warmup=warmup, steps=steps, schedule=schedule, cooldown=cooldown
        )
        for step in range(steps)
    ]


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


def test_shares_of_the_steps_become_steps_in_the_plan(options, config, new_run):
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    asked = {"steps": 200, "schedule": "wsd", "batch_warmup": 0.3, "length_warmup": 0.1}
    plan = make_plan(dataclasses.replace(options, **asked, untie_at=0.7), task, CPU)
    assert (plan.schedule, plan.warmup, plan.cooldown) == ("wsd", 10, 80)
    assert (plan.batch_warmup, plan.length_warmup, plan.untie_at) == (60, 20, 140)
    assert plan.rate(119) == plan.rate(120) == plan.lr > plan.rate(121)
    with pytest.raises(CorruptInputError, match="no training goes by"):
        dataclasses.replace(plan, schedule="steps")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cooldown": 0.2}, "--schedule wsd"),
        ({"schedule": "wsd", "cooldown": 0.8, "warmup": 0.3}, "add up to more than 1"),
        ({"batch_warmup": 1.5}, "--batch-warmup must be .* 1.5"),
        ({"untie_at": 1.0}, "--untie-at must be .* 1.0"),
        ({"task": "classify", "data": ("x",), "batch_warmup": 0.1}, "--batch-warmup .* --task lm"),
        ({"task": "classify", "data": ("x",), "length_warmup": 0.1}, "--length-warmup .* lm"),
        ({"task": "classify", "data": ("x",), "untie_at": 0.5}, "--untie-at 0.5 is for --task lm"),
    ],
)
def test_shares_that_cannot_be_are_named(wrong, says):
    with pytest.raises(UserError, match=says):
        TrainOptions(**wrong)


def growth(**changed):
    sizes = {"batch_size": 12, "micro_batch": 3, "row_units": 256}
    return Growth(**(sizes | changed))


def test_a_batch_grows_by_whole_micro_batches():
    grows = growth(batch_warmup=40)
    rows = [grows.shape(step)[0] for step in range(50)]
    assert rows[0] == 3 and set(rows) == {3, 6, 9, 12} and rows == sorted(rows)
    assert rows[40:] == [12] * 10
    assert {grows.shape(step)[1] for step in range(50)} == {256}


def test_a_batch_that_is_one_micro_batch_grows_by_eighths():
    grows = growth(batch_size=16, micro_batch=16, batch_warmup=80)
    assert sorted({grows.shape(step)[0] for step in range(90)}) == list(range(2, 17, 2))


def test_rows_grow_by_16_tokens_from_an_eighth_of_the_context():
    grows = growth(length_warmup=100)
    lengths = [grows.shape(step)[1] for step in range(101)]
    assert lengths[0] == 32 and lengths[100] == 256 and lengths == sorted(lengths)
    assert all(length % 16 == 0 for length in lengths)
    short = growth(row_units=20, length_warmup=10)
    assert [short.shape(step)[1] for step in (0, 9, 10)] == [16, 20, 20]


def test_what_was_seen_before_a_step_is_the_sum_of_the_shapes():
    grows = growth(batch_warmup=30, length_warmup=45)
    shapes = [grows.shape(step) for step in range(70)]
    for step in (0, 1, 29, 30, 44, 45, 46, 69):
        assert grows.rows_before(step) == sum(rows for rows, _ in shapes[:step])
        assert grows.units_before(step) == sum(rows * length for rows, length in shapes[:step])
    assert growth().units_before(7) == 7 * 12 * 256


@pytest.fixture
def growing(plan):
    return dataclasses.replace(plan, batch_warmup=4, length_warmup=5, micro_batch=2)


def test_growing_batches_take_the_rows_one_after_another_and_cut_them(new_run, config, growing):
    config = dataclasses.replace(config, n_positions=64)
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    batch = task.batches(growing)
    ids = [batch(step)[0] for step in range(7)]
    assert [a.shape for a in ids] == [(2, 16), (2, 32), (4, 32), (4, 48), (4, 64), (4, 64), (4, 64)]
    whole = Batches(task._train, batch_size=24, n_positions=64, seed=growing.seed).batch(0)
    first = 0
    for step in (3, 0, 6, 3):  # in any order: a function of (seed, step)
        first = sum(len(a) for a in ids[:step])
        again, targets = batch(step)
        rows = slice(first, first + len(again))
        for made, there in zip((again, targets), whole, strict=True):
            np.testing.assert_array_equal(made, there[rows, -made.shape[1] :])
        assert (targets != -100).any(axis=1).all()


def test_a_growing_run_that_stopped_equals_one_that_never_did_and_counts_its_tokens(
    new_run, config, growing
):
    config = dataclasses.replace(config, n_positions=64)
    runs = [new_run(name)[0] for name in ("whole", "parts")]
    tokenizer = new_run("tokens")[1]
    for run, stops in zip(runs, ([], [1, 3]), strict=True):
        for stop in (*stops, None):
            asked = [False]
            task = LanguageModelling(run, config, tokenizer)
            for event in train(run, task, growing, CPU, stop_requested=lambda a=asked: a[0]):
                asked[0] = isinstance(event, Stepped) and event.step == stop
    assert metrics(runs[0].path) == metrics(runs[1].path)
    sums = [(checkpoints(r.checkpoints)[-1] / "manifest.json").read_text() for r in runs]
    assert json.loads(sums[0]) == json.loads(sums[1])
    shapes = [(2, 16), (2, 32), (4, 32), (4, 48), (4, 64), (4, 64)]
    counted = [line["tokens"] for line in metrics(runs[1].path) if "loss" in line]
    assert counted == np.cumsum([rows * length for rows, length in shapes]).tolist()
    lines = [json.loads(line) for line in runs[0].metrics.read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if "loss" in line]
    spent = sum(b * t / speed for (b, t), speed in zip(shapes, speeds, strict=True))
    assert read_history(runs[0].path).seconds == pytest.approx(spent)


def test_a_sweep_over_rates_is_on_whole_batches(new_run, config, plan, growing):
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    plain = dataclasses.replace(plan, micro_batch=2)
    assert sweep(task, growing, CPU, steps=5) == sweep(task, plain, CPU, steps=5)


def test_minutes_are_filled_where_the_first_steps_are_small(new_run, config, options, monkeypatch):
    monkeypatch.setattr("tiedgpt.train.plan.measured_steps", lambda *_: 1000)
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    asked = dataclasses.replace(options, steps=None, minutes=1.0)
    assert make_plan(asked, task, CPU).steps == 1000
    grown = make_plan(dataclasses.replace(asked, batch_warmup=1.0, batch_size=16), task, CPU)
    seen = grown.growth(16).units_before(grown.steps)
    assert grown.steps > 1500 and seen == pytest.approx(1000 * 16 * 16, rel=0.01)


def test_the_rate_goes_with_the_width_for_adamw_and_with_its_root_for_muon():
    assert transferred_rate(1e-3, width=128, to=512, rule="adamw") == pytest.approx(2.5e-4)
    assert transferred_rate(1e-3, width=128, to=512, rule="muon") == pytest.approx(5e-4)


def test_a_width_of_ones_own_has_more_heads_and_a_transferred_rate():
    size, options = SIZES["tiny"], TrainOptions(size="tiny", width=512)
    config = options.model_config(vocab_size=99, bos=None, eos=None)
    assert (config.n_embd, config.n_head, config.n_layer) == (512, 16, size.n_layer)
    assert options.peak_rate(config) == pytest.approx(size.lr / 2)
    adamw = dataclasses.replace(options, optimizer="adamw")
    assert adamw.peak_rate(config) == pytest.approx(size.lr_adamw / 4)
    for wrong in ({"width": 100}, {"start": "x", "width": 512}):
        with pytest.raises(UserError, match="--width"):
            TrainOptions(size="auto" if "start" in wrong else "tiny", **wrong)
