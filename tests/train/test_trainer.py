import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.train.conftest import CPU, train
from tests.train.trials import metrics as metrics_of
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, DivergedError, UserError
from tiedgpt.train import loop as trainer_module
from tiedgpt.train.checkpoint import checkpoints, verify
from tiedgpt.train.events import Ended, Evaluated, Replanned, Skipped, Started, Stepped
from tiedgpt.train.objectives.language import LanguageModelling
from tiedgpt.train.sizing import make_longer
from tiedgpt.train.step import train_step
from tiedgpt.train.storage import make_record, read_plan
from tiedgpt.weights.containers import SafetensorsFile


def run_all(run, config, plan, tokenizer, stop_after=None):
    events = []
    stop = [False]
    task = LanguageModelling(run, config, tokenizer)
    for event in train(run, task, plan, CPU, stop_requested=lambda: stop[0]):
        events.append(event)
        if isinstance(event, Stepped | Skipped) and event.step == stop_after:
            stop[0] = True
    return events


def weights(run):
    return GPT.from_pretrained(run.model).state_dict()


def metrics(run):
    return metrics_of(run.path)


def test_training_lowers_the_loss_and_leaves_a_model_that_generates(new_run, config, plan):
    run, tokenizer = new_run()
    plan = dataclasses.replace(plan, steps=40)
    events = run_all(run, config, plan, tokenizer)
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert isinstance(events[0], Started) and isinstance(events[-1], Ended)
    assert events[-1].finished and events[-1].score.nats < losses[0]
    assert [e.step for e in events if isinstance(e, Evaluated)] == list(range(4, 40, 4))
    from tiedgpt.infer import Engine

    assert Engine(run.model).generate("line", max_new_tokens=5, temperature=0).text


@pytest.mark.parametrize(
    ("stop_after", "dropout", "rule", "dtype"),
    [
        (1, 0.0, "muon", "fp32"),
        (3, 0.2, "muon", "fp32"),
        (5, 0.2, "adamw", "fp32"),
        (4, 0.0, "adamw", "fp32"),
        (3, 0.2, "muon", "bf16"),
        (5, 0.0, "adamw", "bf16"),
    ],
)
def test_a_run_that_stopped_and_went_on_equals_one_that_never_stopped(
    new_run, config, plan, stop_after, dropout, rule, dtype
):
    plan = dataclasses.replace(plan, optimizer=rule, dtype=dtype)
    config = dataclasses.replace(
        config, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout
    )
    whole, tokenizer = new_run("whole")
    run_all(whole, config, plan, tokenizer)
    parts, _ = new_run("parts")
    first = run_all(parts, config, plan, tokenizer, stop_after=stop_after)
    assert not first[-1].finished and first[-1].step == stop_after
    torch.manual_seed(999)  # whatever happened to the random stream in between
    second = run_all(parts, config, plan, tokenizer)
    assert second[0].step == stop_after
    for name, parameter in weights(whole).items():
        assert torch.equal(parameter, weights(parts)[name]), name
    assert metrics(whole) == metrics(parts)
    one, other = (checkpoints(r.checkpoints)[-1] / "optimizer.safetensors" for r in (whole, parts))
    assert one.read_bytes() == other.read_bytes()


def test_a_killed_run_goes_on_from_its_last_checkpoint_without_repeated_metrics(
    new_run, config, plan
):
    whole, tokenizer = new_run("whole")
    run_all(whole, config, plan, tokenizer)
    killed, _ = new_run("killed")
    for event in train(killed, LanguageModelling(killed, config, tokenizer), plan, CPU):
        if isinstance(event, Stepped) and event.step == 5:
            break  # as if the process had been killed: nothing more is written
    with killed.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [path.name for path in checkpoints(killed.checkpoints)] == ["step-000002", "step-000004"]
    run_all(killed, config, plan, tokenizer)
    assert metrics(killed) == metrics(whole)
    for name, parameter in weights(whole).items():
        assert torch.equal(parameter, weights(killed)[name]), name


def test_gradient_accumulation_gives_the_gradient_of_the_whole_batch(tiny, plan):
    ids = torch.randint(97, (5, 24)).numpy()
    targets = ids.copy()
    targets[0, :20] = -100  # parts with different numbers of counted targets
    gradients = []
    for micro_batch in (5, 2):
        parts = dataclasses.replace(plan, micro_batch=micro_batch)
        result = train_step(tiny, [], (ids, targets), parts)
        gradients.append([result.loss, result.grad_norm, *(p.grad for p in tiny.parameters())])
    for whole, summed in zip(*gradients, strict=True):
        torch.testing.assert_close(summed, whole, atol=1e-6, rtol=1e-4)


def test_checkpoints_carry_sums_and_old_ones_go(new_run, config, plan):
    run, tokenizer = new_run()
    run_all(run, config, plan, tokenizer)
    kept = checkpoints(run.checkpoints)
    assert [path.name for path in kept] == ["step-000004", "step-000006"]
    assert (run.checkpoints / "latest").read_text() == "step-000006\n"
    for path in kept:
        verify(path)
    assert not [p for p in run.checkpoints.iterdir() if "tmp" in p.name]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over_with_a_note(new_run, config, plan, file):
    run, tokenizer = new_run()
    run_all(run, config, plan, tokenizer, stop_after=5)
    newest = checkpoints(run.checkpoints)[-1] / file
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    events = run_all(run, config, plan, tokenizer)
    assert events[0].step == 4
    assert file in events[0].notes[0]
    assert events[-1].finished


def test_with_no_good_checkpoint_left_training_does_not_silently_begin_again(new_run, config, plan):
    run, tokenizer = new_run()
    run_all(run, config, plan, tokenizer, stop_after=3)
    for path in checkpoints(run.checkpoints):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptInputError, match="no good checkpoint"):
        run_all(run, config, plan, tokenizer)


def not_finite_at(monkeypatch, *steps):
    """Have the loss of these steps, counted from 1, be NaN, whenever they are done."""
    of_batches, of_model = LanguageModelling.batches, LanguageModelling.loss
    now = [0]

    def batches(task, plan):
        batch = of_batches(task, plan)
        return lambda step: (now.__setitem__(0, step + 1), batch(step))[1]

    def poisoned(task, model, part):
        loss = of_model(task, model, part)
        return loss * float("nan") if now[0] in steps and model.training else loss

    monkeypatch.setattr(LanguageModelling, "batches", batches)
    monkeypatch.setattr(LanguageModelling, "loss", poisoned)


def test_a_step_that_is_not_finite_is_skipped_and_counted(new_run, config, plan, monkeypatch):
    not_finite_at(monkeypatch, 3)
    run, tokenizer = new_run()
    model = None
    before: list[torch.Tensor] = []
    for event in train(run, LanguageModelling(run, config, tokenizer), plan, CPU):
        if isinstance(event, Started):
            model = event.model
        if isinstance(event, Stepped) and event.step == 2:
            before = [parameter.clone() for parameter in model.parameters()]
        if isinstance(event, Skipped):
            assert (event.step, event.skipped_in_all) == (3, 1) and "nan" in event.why
            assert all(map(torch.equal, model.parameters(), before))
    assert isinstance(event, Ended) and event.finished
    (line,) = (line for line in metrics(run) if "skipped" in line)
    assert line["step"] == 3 and line["tokens"] == 3 * 64 and "loss" not in line
    json.loads(run.metrics.read_text().splitlines()[2], parse_constant=pytest.fail)
    state = json.loads((checkpoints(run.checkpoints)[-1] / "state.json").read_text())
    assert state["health"]["skipped"] == [3]
    moments = SafetensorsFile.open(checkpoints(run.checkpoints)[-1] / "optimizer.safetensors")
    assert moments.read("wte.weight/step") == 5  # the optimizer saw five of the six steps


@pytest.mark.parametrize("stop_after", [2, 3, 4])
def test_a_run_with_skipped_steps_resumes_as_if_it_never_stopped(
    new_run, config, plan, monkeypatch, stop_after
):
    not_finite_at(monkeypatch, 3, 5)
    config = dataclasses.replace(config, embd_pdrop=0.2)
    whole, tokenizer = new_run("whole")
    run_all(whole, config, plan, tokenizer)
    parts, _ = new_run("parts")
    run_all(parts, config, plan, tokenizer, stop_after=stop_after)
    run_all(parts, config, plan, tokenizer)
    assert metrics(whole) == metrics(parts)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        one, other = (checkpoints(r.checkpoints)[-1] / name for r in (whole, parts))
        assert one.read_bytes() == other.read_bytes(), name


def test_too_many_skipped_steps_end_the_run_with_a_diagnosis(new_run, config, plan, monkeypatch):
    not_finite_at(monkeypatch, 3, 5, 6)
    monkeypatch.setattr("tiedgpt.train.step.MOST_SKIPS", 3)
    run, tokenizer = new_run()
    plan = dataclasses.replace(plan, steps=12)
    says = (
        r"3 of the last 200 steps had no finite loss or gradient at step 6; first not finite: the "
        r"gradient of .*; rate 0\.0\S+, losses before: \S+, .*; the state after step 4 is kept"
    )
    with pytest.raises(DivergedError, match=says) as error:
        run_all(run, config, plan, tokenizer)
    assert error.value.exit_code == 5
    verify(checkpoints(run.checkpoints)[-1])
    with pytest.raises(DivergedError, match="at step 6"):  # the same again, not one step further
        run_all(run, config, plan, tokenizer)


def test_weights_that_are_not_finite_are_named(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    step = trainer_module.train_step
    calls = []

    def poisoned(model, optimizers, batch, plan, world, task):
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                model.ln_f.weight[0] = float("nan")
        return step(model, optimizers, batch, plan, world, task=task)

    monkeypatch.setattr(trainer_module, "train_step", poisoned)
    with pytest.raises(
        DivergedError, match=r"ln_f.weight is no longer finite at step 4; .* step 2"
    ):
        run_all(run, config, plan, tokenizer)
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-000002"]


def test_a_rate_that_is_far_too_high_ends_the_run(new_run, config, plan):
    run, tokenizer = new_run()
    plan = dataclasses.replace(plan, steps=150, lr=5.0, optimizer="adamw", warmup=0)
    plan = dataclasses.replace(plan, eval_every=200, save_every=200)
    with pytest.raises(DivergedError, match=r"mean loss of the last 100 steps is .* step 100"):
        run_all(run, config, plan, tokenizer)


EVALUATE = LanguageModelling.evaluate


def scores_of(monkeypatch, losses):
    """Have the evaluations of a part find these losses."""
    found = iter(losses)

    def fake(task, model, plan, n_batches=None):
        score = EVALUATE(task, model, plan, n_batches)
        if n_batches is None:
            return score
        return dataclasses.replace(score, nats=next(found))

    monkeypatch.setattr(LanguageModelling, "evaluate", fake)


def test_patience_ends_the_run_and_the_best_weights_become_the_model(
    new_run, config, plan, monkeypatch
):
    plan = dataclasses.replace(plan, steps=40, eval_every=2, save_every=3, patience=2)
    losses = [3.0, 2.5, 2.6, 2.7, 2.7]  # after steps 2, 4, 6, 8, and 8 again
    run, tokenizer = new_run()
    scores_of(monkeypatch, losses)
    events = run_all(run, config, plan, tokenizer)
    assert events[-1].finished and events[-1].step == 8 and run.finished()
    ended, best = events[-1].notes
    assert "ended after step 8 of 40: validation was best after step 4" in ended
    assert "best validation was after step 4 (2.5000" in best
    assert metrics(run)[-1]["best_step"] == 4
    kept = {path.name: path for path in checkpoints(run.checkpoints)}
    assert list(kept) == ["step-000004", "step-000006", "step-000008"]
    best = SafetensorsFile.open(kept["step-000004"] / "model.safetensors")
    assert torch.equal(best.read("wte.weight"), weights(run)["wte.weight"])

    again, _ = new_run("stopped")  # between the best and the end
    scores_of(monkeypatch, losses[:3])
    assert not run_all(again, config, plan, tokenizer, stop_after=7)[-1].finished
    scores_of(monkeypatch, losses[3:])
    run_all(again, config, plan, tokenizer)
    assert metrics(run) == metrics(again)
    assert all(torch.equal(weights(run)[name], weights(again)[name]) for name in weights(run))


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_best_weights_are_published_unless_the_last_are_asked_for(
    new_run, config, plan, monkeypatch, keep
):
    run, tokenizer = new_run()
    scores_of(monkeypatch, [2.0, 2.1, 2.2])
    ended = run_all(run, config, dataclasses.replace(plan, eval_every=2, keep=keep), tokenizer)[-1]
    step = {"best": 2, "last": 6}[keep]
    kept = SafetensorsFile.open(run.checkpoints / f"step-{step:06d}" / "model.safetensors")
    assert torch.equal(weights(run)["wte.weight"], kept.read("wte.weight"))
    assert ended.sample_nats == {"best": 2.0, "last": 2.2}[keep]
    says = {
        "best": "the best validation was after step 2 (2.0000, and 2.2000 after the last, 6)",
        "last": "better after step 2 (2.0000) than after the last (2.2000): --keep best",
    }
    assert says[keep] in ended.notes[0]


def test_a_run_ends_when_validation_has_turned_and_not_when_it_is_only_unlucky(
    new_run, config, plan, monkeypatch
):
    plan = dataclasses.replace(plan, steps=12, eval_every=1, save_every=3)
    turned = [3.0, 2.0, 2.015, 2.01, 2.015, 2.03]  # more than 1 % above the best, at the last
    for number, (keep, scores, steps) in enumerate(
        [("best", [*turned, 2.03], 6), ("last", [*turned, *[2.1] * 6], 12)]
    ):
        run, tokenizer = new_run(str(number))
        scores_of(monkeypatch, scores)
        ended = run_all(run, config, dataclasses.replace(plan, keep=keep), tokenizer)[-1]
        assert ended.finished and ended.step == steps


def longer(run, options, plan):
    """Have a run that ended go on for twice as long; return its plan."""
    run.write_record(
        make_record(options, options.model_config(vocab_size=9, bos=0, eos=0), plan, {})
    )
    tables = make_longer(run, dataclasses.replace(options, steps=None, minutes=6.0), 2.0)
    return read_plan(tables)[1]


def test_the_last_weights_of_a_run_that_goes_on_stay_its_best(
    new_run, config, plan, options, monkeypatch
):
    plan = dataclasses.replace(plan, eval_every=2)
    losses = [3.0, 2.9, 2.0], [2.01] * 9
    once, tokenizer = new_run("once")
    twice, _ = new_run("twice")
    for run, stop_after in (once, None), (twice, 7):
        scores_of(monkeypatch, losses[0])
        run_all(run, config, plan, tokenizer)
        more = longer(run, options, plan)
        if stop_after is not None:
            scores_of(monkeypatch, losses[1][:1])
            assert not run_all(run, config, more, tokenizer, stop_after)[-1].finished
        scores_of(monkeypatch, losses[1][0 if stop_after is None else 1 :])
        ended = run_all(run, config, more, tokenizer)[-1]
        assert (ended.step, ended.sample_nats) == (12, 2.0)
        assert metrics(run)[-1]["best_step"] == 6
    assert metrics(once) == metrics(twice)
    assert all(torch.equal(weights(once)[name], weights(twice)[name]) for name in weights(once))


def test_a_plan_made_longer_tells_its_own_time_and_not_why_a_size_was_chosen(
    new_run, config, plan, options
):
    run, tokenizer = new_run()
    run_all(run, config, plan, tokenizer)
    more = longer(run, options, dataclasses.replace(plan, minutes=3.0, reason="it is the best"))
    assert (more.steps, more.minutes, more.reason) == (12, 6.0, "")
    assert more.before is not None and more.before.reason == "it is the best"


@pytest.mark.parametrize("patience", [None, 3])
def test_a_run_whose_validation_had_turned_trains_when_it_is_asked_to_go_on(
    new_run, config, plan, options, monkeypatch, patience
):
    plan = dataclasses.replace(plan, steps=12, eval_every=1, patience=patience)
    run, tokenizer = new_run()
    scores_of(monkeypatch, [3.0, 2.0, 2.1, 2.1, 2.1, 2.1])
    assert run_all(run, config, plan, tokenizer)[-1].step == 5
    more = dataclasses.replace(longer(run, options, plan), eval_every=1)
    scores_of(monkeypatch, [1.5, *[1.6] * 9])
    ended = run_all(run, config, more, tokenizer)[-1]
    assert ended.step == 9 and metrics(run)[-1]["best_step"] == 6


class FakeClock:
    """Seconds that pass at each step, as the trainer's clock tells them."""

    def __init__(self, monkeypatch, a_step):
        self.now, self.a_step = 1000.0, a_step
        monkeypatch.setattr(trainer_module.time, "perf_counter", self)

    def __call__(self):
        self.now += 1e-6
        return self.now

    def train(self, run, config, plan, tokenizer, stop_after=None):
        """Return the events of a training in which each step takes `a_step`."""
        stop, events = [False], []
        task = LanguageModelling(run, config, tokenizer)
        trainer = train(run, task, plan, CPU, stop_requested=lambda: stop[0])
        for event in trainer:
            events.append(event)
            self.now += self.a_step if isinstance(event, Stepped) else 0
            stop[0] |= isinstance(event, Stepped) and event.step == stop_after
        return events


@pytest.mark.parametrize(("a_step", "replanned_at", "steps"), [(2.0, 8, 22), (0.5, 10, 112)])
def test_a_run_is_planned_again_after_a_quarter_of_the_time_or_of_the_steps(
    new_run, config, plan, options, monkeypatch, a_step, replanned_at, steps
):
    plan = dataclasses.replace(
        plan, steps=40, minutes=1.0, eval_every=5, save_every=7, dtype="fp32"
    )
    run, tokenizer = new_run()
    run.write_record(make_record(options, config, plan, {}))
    clock = FakeClock(monkeypatch, a_step)
    events = clock.train(run, config, plan, tokenizer)
    (event,) = [e for e in events if isinstance(e, Replanned)]
    assert event.step == replanned_at
    assert event.plan.steps == events[-1].step == pytest.approx(steps, abs=1)
    assert f"{event.plan.steps} steps instead of 40" in event.notes[0]
    lrs = [e.lr for e in events if isinstance(e, Stepped)]
    assert lrs[:replanned_at] == [plan.rate(step) for step in range(replanned_at)]
    assert lrs[-1] == event.plan.rate(event.plan.steps - 1) < 0.05 * plan.lr

    _, made = read_plan(run.read_record())
    assert made == event.plan and made.before == plan and made.since == replanned_at
    again, _ = new_run("again")  # by the recorded plan, stopped before and after it came in
    for stop in (3, replanned_at + 4, None):
        clock.train(again, config, made, tokenizer, stop_after=stop)
    assert metrics(again) == metrics(run)
    assert all(torch.equal(weights(run)[name], weights(again)[name]) for name in weights(run))


def test_a_plan_whose_pace_was_right_stays_as_it_is(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    plan = dataclasses.replace(plan, steps=40, minutes=1.0, eval_every=40)
    events = FakeClock(monkeypatch, 1.25).train(run, config, plan, tokenizer)
    assert events[-1].step == 40 and not any(isinstance(e, Replanned) for e in events)


def test_a_slow_run_planned_again_still_trains_its_whole_warmup(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    plan = dataclasses.replace(plan, steps=40, minutes=1.0, eval_every=40, warmup=6, cooldown=10)
    events = FakeClock(monkeypatch, 30.0).train(run, config, plan, tokenizer)
    (event,) = [e for e in events if isinstance(e, Replanned)]
    assert event.plan.steps == event.plan.warmup == events[-1].step == 6
    assert event.plan.cooldown == 0


def test_the_end_survives_the_loss_of_the_best_weights(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    scores_of(monkeypatch, [2.0, 2.1, 2.2])
    plan = dataclasses.replace(plan, eval_every=2)
    task = LanguageModelling(run, config, tokenizer)
    for event in train(run, task, plan, CPU):
        if isinstance(event, Stepped) and event.step == 6:
            (run.checkpoints / "step-000002" / "model.safetensors").write_bytes(b"gone")
    assert "of step 2, are lost" in event.notes[0]
    assert run.finished()


def test_two_trainings_cannot_share_a_directory(new_run):
    run, _ = new_run()
    (run.path / ".lock").touch()
    with run.locked(), pytest.raises(UserError, match="is in use: process"), run.locked():
        pass
    with run.locked():
        pass


def test_a_directory_of_other_things_is_not_taken_for_a_run(tmp_path):
    from tiedgpt.train.storage import RunDirectory

    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    with pytest.raises(UserError, match="is no run"), RunDirectory(tmp_path / "letters").locked():
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"), RunDirectory(tmp_path / "file").locked():
        pass


def test_a_run_killed_while_it_publishes_is_not_finished(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    (run.path / ".lock").touch()
    run_all(run, config, plan, tokenizer, stop_after=3)  # publishes the model of step 3

    def killed(self, directory):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            run_all(run, config, plan, tokenizer)
    assert not run.finished()
    run_all(run, config, plan, tokenizer)
    assert run.finished()
    newest = SafetensorsFile.open(checkpoints(run.checkpoints)[-1] / "model.safetensors")
    assert torch.equal(newest.read("wte.weight"), weights(run)["wte.weight"])


def test_weights_that_are_not_finite_are_never_saved(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    step = trainer_module.train_step
    calls = []

    def breaking(model, optimizers, batch, plan, world, task):
        result = step(model, optimizers, batch, plan, world, task=task)
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                model.wte.weight[3, 3] = float("inf")
        return result

    monkeypatch.setattr(trainer_module, "train_step", breaking)
    with pytest.raises(DivergedError, match=r"wte\.weight is no longer finite .*nothing was saved"):
        run_all(run, config, plan, tokenizer)
    assert not checkpoints(run.checkpoints)


def test_shards_that_changed_between_sessions_are_noticed(new_run, config, plan):
    run, tokenizer = new_run()
    run_all(run, config, plan, tokenizer, stop_after=3)
    shard = run.data / "train_000000.bin"
    kept = bytearray(shard.read_bytes()[: 1024 + 200])
    kept[8:12] = (100).to_bytes(4, "little")
    shard.write_bytes(kept)
    with pytest.raises(CorruptInputError, match="100 train tokens"):
        run_all(run, config, plan, tokenizer)


def test_checkpoints_without_a_record_are_not_trained_on(new_run, config, plan):
    run, tokenizer = new_run()
    (run.path / ".lock").touch()
    run_all(run, config, plan, tokenizer, stop_after=3)
    with pytest.raises(CorruptInputError, match=r"no run\.toml"), run.locked():
        pass
    run.record.write_text("")
    with pytest.raises(CorruptInputError, match="damaged"):
        run.read_record()


def test_what_a_killed_process_left_is_swept_away(new_run):
    run, _ = new_run()
    (run.path / ".lock").touch()
    run.record.write_text("[options]")
    run.checkpoints.mkdir()
    left = run.checkpoints / ".step-000008.tmp-1"
    left.mkdir()
    with run.locked():
        assert not left.exists()
