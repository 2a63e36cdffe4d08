import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import PLAN, assert_resumes, assert_same, open_trial
from tiedgpt.errors import CorruptInputError, DivergedError, UserError
from tiedgpt.infer import Engine
from tiedgpt.train.events import Ended, Evaluated, Replanned, Skipped, Started, Stepped
from tiedgpt.train.plan.time import prolong
from tiedgpt.train.store.checkpoint import list_checkpoints, verify
from tiedgpt.train.store.directory import RunDirectory, plan_tables, read_plan
from tiedgpt.train.tasks.language import LanguageModelling
from tiedgpt.train.tasks.published_text import TextPublisher


def test_training_lowers_the_loss_and_leaves_a_model_that_generates(trial):
    run = trial(steps=40)
    events = run.train()
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert isinstance(events[0], Started) and isinstance(events[-1], Ended)
    assert events[-1].finished and events[-1].score.nats < losses[0]
    assert [event.step for event in find(events, Evaluated)] == list(range(4, 40, 4))
    assert Engine(run.run.model).generate("line", max_new_tokens=5, temperature=0).text


@pytest.mark.parametrize(
    ("stop_after", "dropout", "rule", "dtype"),
    [
        (1, 0.0, "muon", "fp32"),
        (3, 0.2, "muon", "fp32"),
        (5, 0.2, "adamw", "fp32"),
        (4, 0.0, "adamw", "fp32"),
        (3, 0.2, "muon", "bf16"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(trial, stop_after, dropout, rule, dtype):
    config = {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout}
    assert_resumes(lambda name: trial(name, config, optimizer=rule, dtype=dtype), stop_after)


def test_without_a_good_checkpoint_training_does_not_silently_restart(trial):
    run = trial()
    run.train(stop_after=3)
    for path in list_checkpoints(run.run.checkpoints):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptInputError, match="no good checkpoint"):
        run.train()


def break_steps(run, *steps):
    """Replace the loss of these steps, counted from 1, by NaN."""
    batches, loss, now = run.data.batches, run.task.loss, [0]

    def watch(batch_size, seed):
        batch_of = batches(batch_size, seed)
        return lambda step: (now.__setitem__(0, step + 1), batch_of(step))[1]

    run.data = dataclasses.replace(run.data, batches=watch)
    run.task.loss = lambda model, part: (
        loss(model, part) * (float("nan") if now[0] in steps and model.training else 1.0)
    )
    return run


def test_a_step_that_is_not_finite_is_skipped_and_counted(trial):
    run = break_steps(trial(), 3)
    for event in run.train():
        if isinstance(event, Skipped):
            assert (event.step, event.skipped_in_all) == (3, 1) and "nan" in event.why
    assert isinstance(event, Ended) and event.finished
    (line,) = (line for line in run.metrics() if "skipped" in line)
    assert line["step"] == 3 and line["tokens"] == 3 * 64 and "loss" not in line
    json.loads(run.run.metrics.read_text().splitlines()[2], parse_constant=pytest.fail)
    assert json.loads(run.newest("state.json").read_text())["run"]["skipped"] == [3]
    moments = load_file(run.newest("optimizer.safetensors"))
    assert moments["wte.weight/step"] == 5  # the optimizer saw five of the six steps


def test_a_skipped_step_leaves_the_weights_as_they_were(trial):
    run = break_steps(trial(save_every=1), 3)
    run.train(stop_after=3)
    two, three = (
        load_file(path / "model.safetensors") for path in list_checkpoints(run.run.checkpoints)[-2:]
    )
    assert all(torch.equal(two[name], three[name]) for name in two)


@pytest.mark.parametrize("stop_after", [2, 3, 4])
def test_a_run_with_skipped_steps_resumes_to_the_same_result(trial, stop_after):
    dropout = {"embd_pdrop": 0.2}
    assert_resumes(lambda name: break_steps(trial(name, dropout), 3, 5), stop_after)


def test_too_many_skipped_steps_end_the_run_with_a_diagnosis(trial):
    run = break_steps(trial(steps=20), 3, *range(5, 14))
    for _ in range(2):  # the same again, not one step further
        with pytest.raises(DivergedError, match="at step 13") as error:
            run.train()
    for part in ("10 of the last 200 steps", "first not finite: the gradient of", "rate 0.0"):
        assert part in str(error.value)
    assert "losses before" in str(error.value) and "step 12 is kept" in str(error.value)
    assert error.value.exit_code == 5 and "--lr" in error.value.hint
    verify(list_checkpoints(run.run.checkpoints)[-1])


@pytest.mark.parametrize(
    ("when", "step", "weight", "says", "kept"),
    [
        ("before", 3, "ln_f.weight", r"ln_f.weight is no longer finite at step 4; .* step 2", 1),
        ("after", 2, "wte.weight", r"wte\.weight is no longer finite .*nothing was saved", 0),
    ],
)
def test_weights_that_are_not_finite_are_named_and_never_saved(
    trial, when, step, weight, says, kept
):
    run, calls = trial(), []
    loss = run.task.loss

    def spoil(model, batch):
        calls.append(1)
        result = loss(model, batch) if when == "after" else None
        if len(calls) == step:
            model.get_parameter(weight).data.flatten()[0] = float("nan")
        return loss(model, batch) if result is None else result

    run.task.loss = spoil
    with pytest.raises(DivergedError, match=says):
        run.train()
    assert len(list_checkpoints(run.run.checkpoints)) == kept


def test_a_far_too_high_learning_rate_ends_the_run(trial):
    run = trial(steps=150, lr=5.0, optimizer="adamw", warmup=0, eval_every=200, save_every=200)
    with pytest.raises(DivergedError, match=r"mean loss of the last 100 steps is .* step 100"):
        run.train()


def test_patience_ends_the_run_and_the_best_weights_become_the_model(trial):
    plan = {"steps": 40, "eval_every": 2, "save_every": 3, "patience": 2}
    losses = [3.0, 2.5, 2.6, 2.7, 2.7]  # after steps 2, 4, 6, 8, and 8 again
    run, again = (trial(name, **plan) for name in ("run", "stopped"))
    events = run.train(losses=losses)
    assert events[-1].finished and events[-1].step == 8 and run.run.is_finished()
    ended, best = events[-1].notes
    assert "after step 8 of 40" in ended and "step 4 (2.5000" in best
    assert "step 4" not in ended and "--minutes" not in ended + best
    assert run.metrics()[-1]["best_step"] == 4
    kept = {path.name: path for path in list_checkpoints(run.run.checkpoints)}
    assert list(kept) == ["step-000004", "step-000006", "step-000008"]
    assert (run.run.checkpoints / "latest").read_text() == "step-000008\n"
    best = load_file(kept["step-000004"] / "model.safetensors")
    assert torch.equal(best["wte.weight"], run.model().wte.weight)

    # stopped between the best and the end
    assert not again.train(stop_after=7, losses=losses[:3])[-1].finished
    again.train(losses=losses[3:])
    assert_same(run, again)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_best_weights_are_published_unless_told_to_keep_the_last(trial, keep):
    run = trial(eval_every=2, keep=keep)
    ended = run.train(losses=[2.0, 2.1, 2.2])[-1]
    step = {"best": 2, "last": 6}[keep]
    kept = load_file(run.run.checkpoints / f"step-{step:06d}" / "model.safetensors")
    assert torch.equal(run.model().wte.weight, kept["wte.weight"])
    assert ended.sample_nats == {"best": 2.0, "last": 2.2}[keep]
    assert "step 2 (2.0000" in ended.notes[0]
    assert ("--keep best" in ended.notes[0]) == (keep == "last")


def test_a_run_ends_when_the_validation_loss_rises_steadily_not_on_noise(trial):
    turned = [3.0, 2.0, 2.015, 2.01, 2.015, 2.03]  # more than 1 % above the best, at the last
    for keep, patience, losses, steps in (
        ("best", None, [*turned, 2.03], 6),
        ("last", 2, [*turned, *[2.1] * 6], 12),
    ):
        run = trial(keep, steps=12, eval_every=1, save_every=3, keep=keep, patience=patience)
        ended = run.train(losses=losses)[-1]
        assert ended.finished and ended.step == steps


def lengthen(run, options, **plan):
    """Prolong a finished run to twice its length."""
    run.write_record(options, **plan)
    longer = dataclasses.replace(options, steps=None, minutes=6.0)
    _, before = read_plan(run.run.read_record())
    plan = prolong(before, longer, run.metrics()[-1]["step"], 2.0)
    run.run.write_record(run.run.read_record() | plan_tables(plan))
    return dataclasses.replace(run, plan=plan)


def test_the_best_weights_of_a_prolonged_run_are_kept(trial, options):
    once, twice = (trial(name, eval_every=2) for name in ("once", "twice"))
    for run, stop_after in (once, None), (twice, 7):
        run.train(losses=[3.0, 2.9, 2.0])
        more, later = lengthen(run, options), [2.0, *[2.01] * 8]
        if stop_after is not None:
            assert not more.train(stop_after, later[:2])[-1].finished
            later = later[2:]
        ended = more.train(losses=later)[-1]
        assert (ended.step, ended.sample_nats) == (12, 2.0)
        assert run.metrics()[-1]["best_step"] == 6
    assert_same(once, twice)


def test_a_prolonged_plan_reports_its_time_and_not_the_choice_of_size(trial, options):
    run = trial()
    run.train()
    more = lengthen(run, options, minutes=3.0, reason="it is the best").plan
    assert (more.steps, more.minutes, more.reason, more.since) == (12, 6.0, "", 6)


@pytest.mark.parametrize(("ends_early", "patience"), [(False, None), (True, None), (True, 3)])
def test_a_prolonged_run_survives_the_loss_of_its_newest_checkpoint(
    trial, options, ends_early, patience
):
    shape = {"steps": 12, "eval_every": 1, "patience": patience} if ends_early else {}
    whole, damaged = (trial(name, **shape) for name in ("whole", "damaged"))
    for run in (whole, damaged):
        end = run.train(losses=[3.0, 2.0, 2.1, 2.1, 2.1, 2.1] if ends_early else None)[-1].step
        assert end == (5 if ends_early else 6) and run.run.is_finished()
        more = lengthen(run, options).change(eval_every=1 if ends_early else 3)
        assert not run.run.is_finished(), "though killed before its next step"
        later = [2.1, 1.5, *[1.6] * 9]  # the end again, and after it
        if run is damaged:
            run.newest("state.json").write_text("{}")
            later = [2.1, *later]
        events = more.train(losses=later if ends_early else None)
        assert events[0].step == (end if run is whole else 4)
        assert events[-1].step == (9 if ends_early else 12)
        assert not ends_early or run.metrics()[-1]["best_step"] == 6
    assert_same(whole, damaged)


def find(events, kind):
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("step_seconds", [2.0, 0.5])
def test_a_run_is_replanned_until_it_ends_with_the_time(trial, options, step_seconds):
    run = trial(steps=40, minutes=1.0, eval_every=5, save_every=7).with_clock(step_seconds)
    run.write_record(options)
    events = run.train()
    first, *later = find(events, Replanned)
    event, replanned_at = later[-1] if later else first, first.step
    assert replanned_at <= 4, "after a tenth of the steps, or of the time"
    assert event.plan.steps == events[-1].step
    assert 0.8 * 60 < event.plan.steps * step_seconds < 60
    assert not any(event.notes for event in find(events, Replanned)), "one line at the end"
    (note,) = (note for note in events[-1].notes if "of 40" in note)
    assert f"{event.plan.steps} fit into the time instead of 40" in note
    assert ("slower" if step_seconds == 2.0 else "faster") in note
    lrs = [step.lr for step in find(events, Stepped)]
    assert lrs[:replanned_at] == [run.plan.rate(step) for step in range(replanned_at)]
    assert lrs[-1] == event.plan.rate(event.plan.steps - 1) < 0.05 * run.plan.lr

    _, made = read_plan(run.run.read_record())
    assert made == event.plan and made.since == event.step


def replanned(trial, options, name, stop_after=None):
    """Return a run of 40 steps, planned again for 28 after step 4, up to a step."""
    run = trial(name, steps=40, minutes=1.0, eval_every=5).with_clock(2.0)
    run.write_record(options)
    (event,) = find(run.train(stop_after), Replanned)
    assert (event.step, event.plan.steps) == (4, 28)
    return dataclasses.replace(run, plan=event.plan)


def test_a_replanned_run_resumes_to_the_same_result(trial, options):
    whole = replanned(trial, options, "whole")
    for damage in ("none", "the newest checkpoint", "run.toml's plan"):
        is_lost = damage == "the newest checkpoint"
        run = replanned(trial, options, damage, 4 if is_lost else 12)
        if is_lost:  # that of the new plan; the one before has the first plan
            run.newest("state.json").write_text("{}")
        if damage == "run.toml's plan":  # killed after the checkpoint, before run.toml was written
            run = dataclasses.replace(run, plan=PLAN).change(steps=40, minutes=1.0, eval_every=5)
            run.write_record(options)
        events = run.train()
        lrs = {step.step: step.lr for step in find(events, Stepped)}
        assert events[0].step == (2 if is_lost else 12)
        rates = {line["step"]: line["lr"] for line in whole.metrics() if "lr" in line}
        assert lrs.items() <= rates.items()
        assert read_plan(run.run.read_record())[1] == whole.plan
        assert_same(whole, run)


def test_a_slow_replanned_run_trains_its_whole_warmup(trial):
    run = trial(steps=40, minutes=1.0, eval_every=40, warmup=6, cooldown=10).with_clock(30.0)
    events = run.train()
    (event,) = find(events, Replanned)
    assert event.plan.steps == event.plan.warmup == events[-1].step == 6
    assert event.plan.cooldown == 0


def test_a_run_ends_well_if_the_best_weights_are_lost(trial):
    run = trial(eval_every=2)
    lost = run.run.checkpoints / "step-000002" / "model.safetensors"
    ended = run.train(
        losses=[2.0, 2.1, 2.2], track=lambda line: line["step"] == 6 and lost.write_bytes(b"gone")
    )[-1]
    assert "of step 2, are lost" in ended.notes[0]
    assert run.run.is_finished()


@pytest.fixture
def locked(trial):
    """A run that a training has been in."""
    run = trial()
    (run.run.path / ".lock").touch()
    return run


def test_a_foreign_directory_is_refused_as_a_run(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    for name, says in (("letters", "contains no training run"), ("file", "is a file")):
        with pytest.raises(UserError, match=says), RunDirectory(tmp_path / name).lock():
            pass


class KilledInPublish(TextPublisher):
    """A publisher whose run is killed before the model is written."""

    def publish(self, model, directory):
        raise KeyboardInterrupt


class KilledInTheEnd(LanguageModelling):
    """A language model with that publisher."""

    def publisher(self, config, data):
        return KilledInPublish(config, data, self.options)


def test_a_run_killed_while_it_publishes_is_not_finished(locked):
    locked.train(stop_after=3)  # publishes the model of step 3
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(locked, task=KilledInTheEnd()).train()
    assert not locked.run.is_finished()
    locked.train()
    assert locked.run.is_finished()
    newest = load_file(locked.newest())
    assert torch.equal(newest["wte.weight"], locked.model().wte.weight)


def test_shards_that_changed_before_resuming_are_refused(trial):
    run = trial()
    run.train(stop_after=3)
    shard = run.run.data / "train_000000.bin"
    kept = bytearray(shard.read_bytes()[: 1024 + 200])
    kept[8:12] = (100).to_bytes(4, "little")
    shard.write_bytes(kept)
    with pytest.raises(CorruptInputError, match=r"train_000000\.bin is missing or has changed"):
        open_trial(run.run.path)


def test_checkpoints_without_run_toml_are_refused(locked):
    locked.train(stop_after=3)
    with pytest.raises(CorruptInputError, match=r"no run\.toml"), locked.run.lock():
        pass
    locked.run.record.write_text("")
    with pytest.raises(CorruptInputError, match="damaged"):
        locked.run.read_record()


def test_leftovers_of_a_killed_process_are_removed(locked):
    locked.run.record.write_text("[options]")
    left = locked.run.checkpoints / ".step-000008.tmp-1"
    left.mkdir(parents=True)
    with locked.run.lock():
        assert not left.exists()
