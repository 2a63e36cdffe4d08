"""Training is one function: its events, its files and its input."""

import builtins
import gc
import io
import multiprocessing
import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest
import torch

from tests.train.conftest import assert_same, metrics, write_lines
from tiedgpt.cli.train import set_on_signals
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer import Engine
from tiedgpt.train import TrainOptions, train
from tiedgpt.train.events import AlreadyFinished, Ended, Planned, Scored, Started, Stepped
from tiedgpt.train.store.checkpoint import list_checkpoints
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.texts import TextSources


@pytest.fixture
def options(text_file):
    return TrainOptions(
        data=(str(text_file),), size="nano", tokenizer="char", context=16, batch_size=2, steps=8,
        dtype="fp32",
    )  # fmt: skip


def kinds(events):
    return [type(event) for event in events if not isinstance(event, Stepped)]


def test_a_training_yields_its_plan_its_steps_and_its_end_and_leaves_a_model(tmp_path, options):
    events = list(train(options, tmp_path / "run"))
    planned = next(event for event in events if isinstance(event, Planned))
    assert planned.plan.steps == 8 == sum(isinstance(event, Stepped) for event in events)
    assert isinstance(events[-1], Ended) and events[-1].finished
    assert kinds(events).index(Planned) + 1 == kinds(events).index(Started)
    assert Engine(tmp_path / "run/model").generate("line", max_new_tokens=3, ignore_eos=True).text
    assert kinds(train(options, tmp_path / "run")) == [AlreadyFinished]


def test_the_final_score_takes_a_share_of_the_time_unless_told_to_score_all(tmp_path, options):
    *events, ended = train(options, tmp_path / "run")
    assert ended.scored == 4 * 2 * 16  # at least four micro-batches
    assert [event for event in events if isinstance(event, Scored)] == [
        Scored(n, 4) for n in (1, 2, 3, 4)
    ]
    *_, ended = train(replace(options, score="all"), tmp_path / "all")
    held_out = RunDirectory(tmp_path / "all").read_record()["val_text"]["tokens"]
    assert ended.scored is None and held_out > 1000


@pytest.mark.parametrize(("n_steps", "n_scored"), [(5, 0), (8, 2)])
def test_a_stopped_training_leaves_a_model_and_resumes_to_the_same_bytes(
    tmp_path, options, n_steps, n_scored
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(train(options, whole))
    steps, batches = [], []
    for event in train(
        options, parts, stop_requested=lambda: (len(steps), len(batches)) == (n_steps, n_scored)
    ):
        steps.extend([event] if isinstance(event, Stepped) else [])
        batches.extend([event] if isinstance(event, Scored) else [])
    assert isinstance(event, Ended) and not event.finished and event.step == n_steps
    assert len(batches) == n_scored and not RunDirectory(parts).is_finished()
    assert Engine(parts / "model").generate("line", max_new_tokens=3, ignore_eos=True).text
    torch.manual_seed(99)
    (started,) = (event for event in train(options, parts) if isinstance(event, Started))
    assert started.step == n_steps
    assert metrics(whole) == metrics(parts)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (list_checkpoints(run / "checkpoints")[-1] / file for run in (whole, parts))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("after", [1, 2])
def test_a_stop_between_the_batches_of_an_evaluation_is_honoured_and_resumes(trial, after):
    whole, parts = trial("whole"), trial("parts")
    whole.train()
    held_out, batches = parts.data.held_out, []

    def watch(*sizes):
        for batch in held_out(*sizes):
            batches.append(batch)
            yield batch

    parts.data = replace(parts.data, held_out=watch)
    events = parts.train(stop_requested=lambda: len(batches) == after)
    assert len(batches) == after and events[-1].step == 4 and not events[-1].finished
    parts.train()
    assert_same(whole, parts)


def test_a_second_signal_ends_the_process_at_once():
    def receive_two():
        stop = threading.Event()
        with set_on_signals(stop):
            os.kill(os.getpid(), signal.SIGINT)
            if stop.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    process = multiprocessing.get_context("fork").Process(target=receive_two)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGINT  # 130 in a shell


def test_an_abandoned_training_releases_its_directory(tmp_path, options):
    events = train(options, tmp_path / "run")
    while not isinstance(next(events), Stepped):
        assert (tmp_path / "run").exists()
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(UserError, match="in use"):
        next(train(options, tmp_path / "run"))
    events.close()
    assert not run.is_in_use()
    with pytest.raises(UserError, match="--start"):  # only a finished run is prolonged
        next(train(replace(options, steps=9), tmp_path / "run"))


@pytest.mark.parametrize("task", ["lm", "classify"])
def test_a_run_that_lost_its_tokenizer_is_refused(tmp_path, options, task):
    if task == "classify":
        lines = ({"text": f"line {n}", "label": n % 2} for n in range(40))
        options = replace(options, task=task, data=(write_lines(tmp_path / "a.jsonl", lines),))
    events = train(options, tmp_path / "run")
    next(event for event in events if isinstance(event, Stepped))
    events.close()
    shutil.rmtree(tmp_path / "run/tokenizer")
    with pytest.raises(CorruptInputError, match="without it the run cannot resume"):
        list(train(options, tmp_path / "run"))


def test_the_text_is_not_held_in_memory_during_the_steps(tmp_path, options):
    events = train(options, tmp_path / "run")
    next(event for event in events if isinstance(event, Stepped))
    gc.collect()
    assert not any(type(each) is TextSources for each in gc.get_objects())
    events.close()


def test_a_file_is_read_once_by_a_fresh_run_and_once_by_one_that_resumes(
    tmp_path, options, monkeypatch
):
    opened, read = [], io.open

    def counted(path, *rest, **more):
        opened.append(str(path))
        return read(path, *rest, **more)

    monkeypatch.setattr(builtins, "open", counted)
    events = train(options, tmp_path / "run")
    next(event for event in events if isinstance(event, Stepped))
    events.close()
    assert opened.count(options.data[0]) == 1
    list(train(options, tmp_path / "run"))
    assert opened.count(options.data[0]) == 2
