import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.train.conftest import CPU
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, DivergedError, UserError
from tiedgpt.train import loop as loop_module
from tiedgpt.train.checkpoint import checkpoints, verify
from tiedgpt.train.language import LanguageModelling
from tiedgpt.train.loop import Ended, Evaluated, Started, Stepped, train
from tiedgpt.train.step import train_step
from tiedgpt.weights.formats.safetensors_file import SafetensorsFile


def run_all(run, config, plan, tokenizer, stop_after=None):
    events = []
    stop = [False]
    task = LanguageModelling(run, config, tokenizer)
    for event in train(run, task, plan, CPU, stop_requested=lambda: stop[0]):
        events.append(event)
        if isinstance(event, Stepped) and event.step == stop_after:
            stop[0] = True
    return events


def weights(run):
    return GPT.from_pretrained(run.model).state_dict()


def metrics(run):
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_per_second")} for line in lines]


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

    assert Engine(run.model).generate("line", max_new_tokens=5).text


@pytest.mark.parametrize(
    ("stop_after", "dropout", "rule"),
    [(1, 0.0, "muon"), (3, 0.2, "muon"), (5, 0.2, "adamw"), (4, 0.0, "adamw")],
)
def test_a_run_that_stopped_and_went_on_equals_one_that_never_stopped(
    new_run, config, plan, stop_after, dropout, rule
):
    plan = dataclasses.replace(plan, optimizer=rule)

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


def test_a_loss_that_is_not_finite_stops_before_the_update(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    step = loop_module.train_step
    calls = []

    def poisoned(model, optimizers, batch, plan):
        calls.append(1)
        if len(calls) == 4:
            with torch.no_grad():
                model.ln_f.weight[0] = float("nan")
        return step(model, optimizers, batch, plan)

    monkeypatch.setattr(loop_module, "train_step", poisoned)
    with pytest.raises(DivergedError, match=r"nan.* at step 4; the state after step 2") as error:
        run_all(run, config, plan, tokenizer)
    assert error.value.exit_code == 5
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-000002"]


def test_two_trainings_cannot_share_a_directory(new_run):
    run, _ = new_run()
    (run.path / ".lock").touch()
    with run.locked(), pytest.raises(UserError, match="is in use: process"), run.locked():
        pass
    with run.locked():
        pass


def test_a_directory_of_other_things_is_not_taken_for_a_run(tmp_path):
    from tiedgpt.train.run_directory import RunDirectory

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
    assert not run.finished(plan.steps)
    run_all(run, config, plan, tokenizer)
    assert run.finished(plan.steps)
    newest = SafetensorsFile.open(checkpoints(run.checkpoints)[-1] / "model.safetensors")
    assert torch.equal(newest.read("wte.weight"), weights(run)["wte.weight"])


def test_weights_that_are_not_finite_are_never_saved(new_run, config, plan, monkeypatch):
    run, tokenizer = new_run()
    step = loop_module.train_step
    calls = []

    def breaking(model, optimizers, batch, plan):
        result = step(model, optimizers, batch, plan)
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                model.wte.weight[3, 3] = float("inf")
        return result

    monkeypatch.setattr(loop_module, "train_step", breaking)
    with pytest.raises(DivergedError, match=r"wte\.weight is no longer finite at step 2; nothing"):
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
