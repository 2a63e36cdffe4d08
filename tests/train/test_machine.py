"""The machine: measured speed, memory and gradients, threads, and what `--dry-run` shows."""

import dataclasses
import itertools
import json
import os
import re
import sys
import tomllib
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import profiler

from tests.train.conftest import CHARACTERS, CONFIG, CPU, PLAN, assert_resumes
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import NoRoomError
from tiedgpt.heads import MultipleChoice, SequenceClassifier
from tiedgpt.train import train
from tiedgpt.train.distributed import Processes
from tiedgpt.train.dry_run import DryRun, dry_run
from tiedgpt.train.events import Note, Replanned, Stepped
from tiedgpt.train.machine import cpu_threads, measure_load, used_memory
from tiedgpt.train.plan.memory import estimate_memory
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.plan.values import Machine
from tiedgpt.train.speed import (
    Measurement,
    SpeedMeasurement,
    measure_machine,
    measure_speed,
    take_part,
)
from tiedgpt.train.step.blocks import keep_memory
from tiedgpt.train.step.measures import GradientNorms, model_flops, peak_flops, peak_memory
from tiedgpt.train.step.optim.groups import make_optimizers
from tiedgpt.train.step.step import train_step
from tiedgpt.train.store.directory import (
    RunDirectory,
    describe_machine,
    format_toml,
    make_record,
    read_plan,
)
from tiedgpt.train.tasks.language import LanguageModelling
from tiedgpt.train.tasks.texts import TextRows


def measure_peak(step, path):
    """Return the most bytes that tensors take while a function runs, by torch's profiler."""
    with profiler.profile(profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_bytes())["traceEvents"]
    held = peak = 0
    for event in events:
        held += event["args"]["Bytes"] if event["name"] == "[memory]" else 0
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(("dtype", "dropout"), [("fp32", 0.0), ("fp32", 0.1), ("bf16", 0.0)])
def test_the_estimate_is_within_a_quarter_of_what_a_step_allocates(trial, tmp_path, dtype, dropout):
    names = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
    shape = {"n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 2}
    run = trial(config=shape | dict.fromkeys(names, dropout), dtype=dtype)
    plan = dataclasses.replace(run.plan, batch_size=8, micro_batch=8, optimizer="adamw")

    def two_steps():
        model = run.build().train()
        _, optimizers = make_optimizers(model, plan)
        for _ in range(2):
            batch = run.data.batches(8, 0)(0)
            train_step(model, optimizers, batch, plan, objective=run.task)

    machine, _ = measure_machine(run.prepared(TrainOptions()), Processes(CPU))
    parts = estimate_memory(run.config, plan, run.data, machine)
    expected = sum(parts.values()) - parts["allocator"]
    assert measure_peak(two_steps, tmp_path / "trace.json") == pytest.approx(expected, rel=0.25)
    again = dataclasses.replace(plan, recompute="blocks")
    recomputed = estimate_memory(run.config, again, run.data, machine)
    assert sum(recomputed.values()) < sum(parts.values())


def test_minutes_become_steps_by_a_measurement(trial):
    plan = trial().make_plan(TrainOptions(size="tiny", minutes=0.5))
    assert plan.steps > 10 and plan.minutes == 0.5


def test_a_busy_machine_trains_with_the_faster_number_of_threads():
    def measure(config, plan):
        return Measurement({1: 900.0}.get(torch.get_num_threads(), 300.0))

    speed = SpeedMeasurement(measure, load=6.4, compares_threads=True)
    with cpu_threads(2):
        assert speed(CONFIG, PLAN) == 900.0
    assert speed.threads == 1
    assert "1 thread, which is 3.0 times as fast as 2; --threads" in speed.notes[0]
    another = dataclasses.replace(PLAN, seed=PLAN.seed + 1)
    assert speed(CONFIG, another) == 900.0, "measured with the chosen threads"


def test_a_first_step_that_compiles_kernels_is_not_the_speed(trial, monkeypatch):
    calls, run = itertools.count(), trial()

    def perf_counter():
        """The first step takes 20 seconds, later ones 0.01."""
        call = next(calls)
        return 20 + (call - 2) // 2 * 0.01 if call >= 2 else 0.0

    monkeypatch.setattr("tiedgpt.train.speed.time", SimpleNamespace(perf_counter=perf_counter))
    result = measure_speed(run.task, run.config, run.data, run.plan, Processes(CPU), 0.1)
    tokens = run.plan.batch_size * run.data.row_units
    assert result.tokens_per_second == pytest.approx(tokens / 0.01)


def test_the_speed_of_a_plan_is_measured_once():
    numbers = itertools.count()
    speed = SpeedMeasurement(lambda config, plan: Measurement(next(numbers)), load=None)
    plans = PLAN, dataclasses.replace(PLAN, batch_size=1, micro_batch=1), PLAN
    assert [speed(CONFIG, plan) for plan in plans] == [0.0, 1.0, 0.0]


def test_all_processes_count_the_seconds_of_compiling_of_the_first(trial, monkeypatch):
    class Second(Processes):
        def broadcast(self, value):
            return 7.0 if isinstance(value, float) else super().broadcast(value)

    monkeypatch.setattr("tiedgpt.train.speed.training_layers", lambda model, plan: nullcontext())
    run = trial()
    machine, speed = measure_machine(run.prepared(TrainOptions(minutes=0.01)), Second(CPU))
    seconds = []
    for compile in ("off", "on"):
        speed(run.config, dataclasses.replace(run.plan, compile=compile))
        seconds.append(machine.compile_seconds())
    assert seconds == [30.0, 7.0]


@pytest.mark.skipif(not hasattr(os, "getloadavg"), reason="the system tells no load")
def test_a_run_by_steps_compares_threads_on_a_busy_machine(options, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    notes = []
    with cpu_threads(2):
        for event in train(dataclasses.replace(options, steps=100), tmp_path / "run"):
            notes += [event.text] if isinstance(event, Note) else []
            if isinstance(event, Stepped):
                break
    (note,) = (note for note in notes if "busy" in note)
    chosen = int(re.search(r"training with (\d) thread", note)[1])
    record = tomllib.loads((tmp_path / "run/run.toml").read_text())
    assert record["training"]["threads"] == chosen in (1, 2)


def test_threads_are_used_and_recorded(options, tmp_path):
    threads = []
    for event in train(options, tmp_path / "run", threads=1):
        if isinstance(event, Stepped):
            threads.append(torch.get_num_threads())
    assert set(threads) == {1}
    record = tomllib.loads((tmp_path / "run/run.toml").read_text())
    assert record["training"]["threads"] == 1


@pytest.mark.parametrize("verb", ["train", "tune --from x", "eval x"])
def test_impossible_numbers_of_threads_are_refused(verb, text_file, capsys):
    assert main([*verb.split(), str(text_file), "--threads", "0"]) == 1
    assert "--threads must be" in capsys.readouterr().err


class LittleRoom(LanguageModelling):
    """A model on a device that has room for two rows at a time."""

    def loss(self, model, batch):
        if len(batch[0]) > 2 and model.training:
            raise torch.OutOfMemoryError("out of memory")
        return super().loss(model, batch)


def test_the_micro_batch_is_halved_when_a_device_is_out_of_memory(trial):
    run = trial(micro_batch=4)
    run.task = LittleRoom()
    events = run.train()
    (halved,) = (event for event in events if isinstance(event, Replanned))
    assert halved.plan.micro_batch == 2 and "no room for 4 sequences" in halved.notes[0]
    steps = [event.step for event in events if isinstance(event, Stepped)]
    assert steps == [1, 2, 3, 4, 5, 6] and events[-1].finished
    whole = trial("whole", micro_batch=2)
    whole.train()
    losses = [[line["loss"] for line in each.metrics() if "loss" in line] for each in (run, whole)]
    assert losses[0] == losses[1]


def test_a_row_that_does_not_fit_is_an_error(trial):
    class NoRoom(LittleRoom):
        def loss(self, model, batch):
            raise torch.OutOfMemoryError("out of memory")

    run = trial(micro_batch=2)
    run.task = NoRoom()
    with pytest.raises(NoRoomError, match="no room for 1 sequence at"):
        run.train()


def test_run_toml_is_read_back_as_it_was_written(options, trial):
    run = trial()
    plan, config = run.make_plan(options), run.config
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


# Measures of a step


@pytest.fixture
def batch():
    drawn = np.random.default_rng(1).integers(0, 97, (2, 5, 24))
    drawn[1, 0, :20] = -100
    drawn[0, :, :4] = 7  # rows that are read often
    return drawn[0], drawn[1]


def two_gradients(model: GPT, ids, targets) -> tuple[float, float]:
    """Return the norms with W taken apart into two matrices, one for each use."""
    reads = model.wte.weight.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    forward = model.wte.forward
    model.wte.forward = lambda ids, *_: F.embedding(ids, reads)
    try:
        model.loss(torch.from_numpy(ids), torch.from_numpy(targets)).backward()
    finally:
        model.wte.forward = forward
    predicts = model.wte.weight.grad if model.head is None else model.head.weight.grad
    return float(reads.grad.norm()), float(predicts.norm())


@pytest.mark.parametrize("micro_batch", [5, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_the_two_norms_equal_those_of_the_separated_gradients(
    tiny_config, batch, micro_batch, tied
):
    torch.manual_seed(2)
    model = GPT(dataclasses.replace(tiny_config, tie_word_embeddings=tied)).eval()
    expected = two_gradients(model, *batch)
    gradients = GradientNorms(model)
    clipped = dataclasses.replace(PLAN, micro_batch=micro_batch, grad_clip=1e-3)
    with gradients.watching():
        train_step(model, [], batch, clipped)
    found = gradients.metrics()
    assert list(found) == ["grad_norm_w_input", "grad_norm_w_output"]
    assert list(found.values()) == pytest.approx(expected, rel=1e-4)


def test_measuring_changes_no_bit_of_a_step(tiny, batch):
    gradients = GradientNorms(tiny)
    seen = []
    for watched in (False, True):
        if watched:
            with gradients.watching():
                result = train_step(tiny, [], batch, PLAN)
        else:
            result = train_step(tiny, [], batch, PLAN)
        seen.append([result, [parameter.grad.clone() for parameter in tiny.parameters()]])
    assert seen[0][0] == seen[1][0]
    assert all(map(torch.equal, seen[0][1], seen[1][1]))
    assert not tiny.wte._forward_hooks, "nothing is left behind"


def test_a_head_that_predicts_no_tokens_has_one_gradient_of_w_and_a_frozen_w_none(tiny):
    head = SequenceClassifier(tiny, labels=["a", "b"])
    ids, lengths = np.ones((2, 8), np.int64), np.array([8, 5])
    gradients, unclipped = GradientNorms(head), dataclasses.replace(PLAN, grad_clip=1e9)
    with gradients.watching():
        train_step(head, [], (ids, lengths, np.array([0, 1])), unclipped)
    whole = pytest.approx(float(tiny.wte.weight.grad.norm()), rel=1e-5)
    assert gradients.metrics() == {"grad_norm_w_input": whole}
    tiny.wte.weight.requires_grad_(False)
    with gradients.watching():
        train_step(head, [], (ids, lengths, np.array([0, 1])), unclipped)
    assert gradients.metrics() == {}


def test_flops_follow_the_convention():
    config = GPTConfig.preset("gpt2", n_layer=2, vocab_size=500, n_positions=64)
    model = GPT(config)
    n = config.parameter_count() - 64 * 768
    assert model_flops(model, 64) == 6 * n + 12 * 2 * 768 * 64
    untied = GPT(dataclasses.replace(config, tie_word_embeddings=False))
    assert model_flops(untied, 64) == model_flops(model, 64), "one product predicts either way"
    assert model_flops(MultipleChoice(model), 64) > model_flops(model, 64)
    head = SequenceClassifier(model, labels=["a", "b"])
    assert model_flops(head, 64) == model_flops(model, 64) - 6 * 498 * 768


def test_the_machine_has_a_name_peak_flops_and_memory():
    assert 1e8 < peak_flops(CPU, "fp32") < 1e15
    assert 1e7 < peak_memory(CPU) < 1e13
    assert describe_machine()["processor"] and describe_machine()["cores"] >= 1


def test_a_resumed_run_measures_what_an_uninterrupted_one_does(trial):
    whole, _ = assert_resumes(lambda name: trial(name, steps=21), 13)
    for path in (whole.run.path, whole.run.path.with_name("parts")):
        lines = RunDirectory(path).read_metrics()
        measured = [line for line in lines if "grad_norm_w_output" in line]
        assert [line["step"] for line in measured] == [1, 10, 20]
        assert all("machine_flops_use" in line for line in measured)


# --dry-run

QUICK = ("--dry-run", "--size", "nano", "--tokenizer", "char", "--context", "16", "--dtype", "fp32")


def test_a_dry_run_prints_the_plan_and_leaves_nothing(text_file, folder, capsys):
    asked = ["train", str(text_file), *QUICK, "--steps", "7"]
    assert main([*asked, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] and said["plan"]["steps"] == 7
    assert said["tokens"] == 7 * said["plan"]["batch_size"] * 16
    assert said["epochs"] == pytest.approx(said["tokens"] / text_file.stat().st_size, rel=0.2)
    assert said["memory_bytes"] == sum(said["memory"].values())
    assert said["seconds"] == pytest.approx(said["tokens"] / said["tokens_per_second"])
    assert main([*asked, "--batch-size", "800", "--parallel", "ddp"]) == 0
    said = capsys.readouterr()
    assert all(part in said.out for part in ("optimizer state", "epochs", "fits in"))
    warned = " ".join(said.err.split())
    assert "of the training data: a smaller --batch-size" in warned
    assert "parameters per token of the text" not in warned
    assert not [*folder.iterdir()]


def dry_runs(options, **changes):
    """Return the plans of a dry run."""
    events = dry_run(dataclasses.replace(options, **changes))
    return [event for event in events if isinstance(event, DryRun)]


def test_a_dry_run_shows_memory_and_steps_before_the_speed_is_measured(options):
    first, last = dry_runs(options, batch_size=None)
    assert first.plan == last.plan and first.has_steps and first.plan.steps == 6
    assert first.tokens_per_second is None and last.tokens_per_second > 0
    first, last = dry_runs(options, steps=None, minutes=1.0)
    assert not first.has_steps and last.has_steps and last.plan.minutes == 1.0
    assert first.plan.micro_batch == last.plan.micro_batch
    (chosen,) = dry_runs(options, size="auto", steps=None, minutes=0.05)
    assert chosen.has_steps and chosen.plan.size != "auto"


@pytest.mark.parametrize("duration", [{"steps": 6}, {"steps": None, "minutes": 0.05}])
def test_a_dry_run_on_a_gpu_has_one_plan_since_the_speed_decides_it(options, duration, monkeypatch):
    monkeypatch.setattr(Machine, "is_gpu", True)
    (plan,) = dry_runs(options, **duration)
    assert plan.has_steps and plan.tokens_per_second > 0


@pytest.mark.parametrize("duration", [("--steps", "7"), ("--minutes", "0.1")])
def test_a_dry_run_prints_the_memory_first(text_file, folder, capfd, duration):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", sys.stdout)
        assert main(["train", str(text_file), *QUICK, *duration]) == 0
    out = capfd.readouterr().out
    memory, note, time = (out.index(text) for text in ("together", "measuring the speed", "time  "))
    assert memory < note < time
    assert (out.index("training  ") < memory) == (duration[0] == "--steps")


PARTS = (
    (1, (4, 2, 16), (1, 1, 16)),  # fewer blocks and rows; no row is shorter than 64 tokens
    (8, (4, 2, 16), (1, 2, 16)),
    (24, (4, 2, 16), (3, 2, 16)),
    (99, (4, 2, 16), (4, 2, 16)),
    (3, (4, 2, 256), (1, 1, 64)),
)


@pytest.mark.parametrize(("rows", "shape", "expected"), PARTS)
def test_a_step_of_many_operations_is_measured_in_part(trial, rows, shape, expected):
    """`rows` is the number of rows of 16 tokens that the limit allows, in eighths."""
    run = trial(config={"n_positions": 256, "n_layer": shape[1]})
    model = run.build()
    data = TextRows(run.run.data, CHARACTERS, is_fresh=False).at(shape[2])
    n = sum(p.numel() for p in model.parameters()) - 256 * 16
    per_token = 6 * n + 12 * 2 * 16 * shape[2]
    block = 12 * 16 * 16 + 13 * 16
    taken = take_part(model, data, run.plan, rows / 8 * per_token * 16)
    assert (taken.rows, len(model.h), taken.n_tokens) == expected
    taken_per_token = 6 * (n - block * (2 - expected[1])) + 12 * expected[1] * 16 * expected[2]
    n_passes = 4 * shape[2] * per_token / (expected[0] * expected[2] * taken_per_token)
    assert taken.n_passes == pytest.approx(n_passes)
    assert bool(taken.text) == (expected != shape)
    _, optimizers = make_optimizers(model, run.plan)
    counts = [taken.count_updates(optimizer) for optimizer in optimizers]
    sizes = [
        sum(p.numel() for group in o.param_groups for p in group["params"]) for o in optimizers
    ]
    total = sum(p.numel() for p in run.build().parameters())
    assert sum(count * size for count, size in zip(counts, sizes, strict=True)) == total


def test_processes_that_share_a_step_measure_whole_rows_of_whole_models(trial):
    run = trial()
    model = run.build()
    taken = take_part(model, run.data, run.plan, 1.0, least_rows=2)
    assert (taken.rows, len(model.h), taken.n_tokens, taken.n_passes) == (2, 2, 16, 2.0)


def test_a_vocabulary_smaller_than_requested_is_noted(text_file, folder, capfd):
    command = ["train", str(text_file), "--dry-run", "--steps", "1", "--context", "16"]
    assert main([*command, "--vocab-size", "60000", "--size", "nano"]) == 0
    out, err = capfd.readouterr()
    size = re.search(r"bpe vocabulary of ([\d,]*\d)", out)[1]
    assert f"{size} tokens instead of 60,000" in " ".join(err.split())
    assert main([*command, "--vocab-size", "300", "--size", "nano"]) == 0
    assert "instead of" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("memory", "remedy"), [("4GB", "use a smaller model"), ("10MB", "the program alone takes")]
)
def test_a_dry_run_that_does_not_fit_shows_the_table_and_ends_with_code_4(
    text_file, capsys, memory, remedy
):
    asked = ["train", str(text_file), "--dry-run", "--size", "gpt3-13b", "--tokenizer", "char"]
    assert main([*asked, "--steps", "7", "--memory", memory]) == 4
    said = capsys.readouterr()
    assert "does not fit in" in said.out and "gradients" in said.out
    assert f"--memory {memory[:-2]}" in " ".join(said.out.split()), "the limit, not the free memory"
    assert remedy in said.err


def test_more_adapters_than_the_width_name_the_option(trial, tmp_path, text_file, capsys):
    run = trial()
    run.train()
    source = str(run.run.model)
    CHARACTERS.save_pretrained(source)
    command = ["tune", str(text_file), "--from", source, "--lora", "99999"]
    assert main([*command, "--out", str(tmp_path / "tuned")]) == 1
    said = capsys.readouterr().err
    assert "--lora must be from 1 to the width 16, got 99999" in said and "--rank" not in said


def test_functions_that_other_systems_lack_are_not_needed(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delattr(os, "getloadavg", raising=False)
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: "")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("glibc is not there"))
    assert measure_load() is None and used_memory(cpu) == 0 and peak_memory(cpu) is None
    keep_memory()
