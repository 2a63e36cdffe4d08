"""Training on a GPU: it learns, resumes after kill -9, halves micro-batches, shards and tunes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.models import TEXT
from tiedgpt import GPT
from tiedgpt.train import TrainOptions, train
from tiedgpt.train.events import Ended, Planned, Replanned, Stepped
from tiedgpt.train.plan.memory import estimate_memory
from tiedgpt.train.plan.values import Machine
from tiedgpt.train.store.directory import RunDirectory

SMALL = {"size": "tiny", "batch_size": 4, "context": 16, "vocab_size": 300}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "cats.txt"
    path.write_text(TEXT * 20)
    return str(path)


def losses_of(run):
    return [line["loss"] for line in RunDirectory(run).read_metrics() if "loss" in line]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_losses_equal_those_of_the_cpu(text, tmp_path, gpu, dtype, optimizer):
    for name, device in (("here", "cpu"), ("there", str(gpu))):
        options = TrainOptions(
            data=(text,), steps=30, device=device, dtype=dtype, optimizer=optimizer,
            compile="off", **SMALL,
        )  # fmt: skip
        ended = list(train(options, tmp_path / name))[-1]
        assert isinstance(ended, Ended) and ended.finished
    expected, losses = (losses_of(tmp_path / name) for name in ("here", "there"))
    assert losses[:8] == pytest.approx(expected[:8], rel=2e-3 if dtype == "fp32" else 3e-2)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_compiled_blocks_have_the_same_losses(text, tmp_path, gpu):
    for compile in ("off", "on"):
        options = TrainOptions(
            data=(text,), steps=12, device=str(gpu), dtype="fp32", compile=compile, **SMALL
        )
        list(train(options, tmp_path / compile))
    expected, losses = (losses_of(tmp_path / compile) for compile in ("off", "on"))
    assert losses == pytest.approx(expected, rel=2e-2)


def command(*arguments):
    return [sys.executable, "-m", "tiedgpt", *arguments]


def test_a_killed_run_resumes(text, tmp_path, gpu):
    options = ["train", text, "--device", str(gpu), "--size", "tiny", "--steps", "400", "--keep"]
    options += [
        "last",
        "--context",
        "16",
        "--vocab-size",
        "300",
        "--batch-size",
        "4",
        "--compile",
        "off",
    ]
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(*options, "--out", str(uninterrupted)), check=True, capture_output=True)
    process = subprocess.Popen(
        command(*options, "--out", str(killed)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not list(killed.glob("checkpoints/step-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command(*options, "--out", str(killed)), check=True, capture_output=True)
    losses, expected = losses_of(killed), losses_of(uninterrupted)
    assert len(losses) == len(expected) == 400
    assert losses[-1] == pytest.approx(expected[-1], rel=0.1)


def test_a_micro_batch_that_does_not_fit_is_halved(text, tmp_path, gpu):
    if gpu.type != "cuda":
        pytest.skip("only CUDA has a limit of memory")
    options = TrainOptions(
        data=(text,), size="small", steps=4, batch_size=64, context=64, vocab_size=300,
        micro_batch=64, device=str(gpu), dtype="fp32", compile="off",
    )  # fmt: skip
    events = train(options, tmp_path / "run")
    planned = next(event for event in events if isinstance(event, Planned))
    machine = Machine(tokens_per_second=lambda *_: 1.0, device=str(gpu))
    needs = [
        sum(estimate_memory(planned.config, plan, planned.data, machine).values())
        for plan in (planned.plan, replace(planned.plan, micro_batch=32))
    ]
    total = torch.cuda.get_device_properties(gpu).total_memory
    try:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(sum(needs) / 2 / total)
        later = list(events)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    sizes = [event.plan.micro_batch for event in later if isinstance(event, Replanned)]
    assert sizes and sizes[0] == 32 and later[-1].finished
    assert sum(isinstance(event, Stepped) for event in later) == 4


def test_one_process_shards_its_weights(text, tmp_path, gpu):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    options = ["train", text, "--device", gpu.type, "--size", "tiny", "--steps", "9", "--parallel"]
    options += ["fsdp", "--context", "16", "--vocab-size", "300", "--batch-size", "4"]
    subprocess.run(
        [*torchrun, "-m", "tiedgpt", *options, "--compile", "off", "--out", str(tmp_path / "run")],
        check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=200,
    )  # fmt: skip
    assert len(losses_of(tmp_path / "run")) == 9


@pytest.mark.parametrize("changes", [{}, {"lora": 4}])
def test_replies_are_tuned(text, tmp_path, gpu, changes):
    list(train(TrainOptions(data=(text,), steps=4, **SMALL), tmp_path / "base"))
    lines = [{"prompt": f"cat {n}", "completion": " sat"} for n in range(40)]
    (tmp_path / "replies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = TrainOptions(
        data=(str(tmp_path / "replies.jsonl"),), recipe="tune", start=str(tmp_path / "base"),
        steps=20, device=str(gpu), **changes,
    )  # fmt: skip
    list(train(options, tmp_path / "tuned"))
    losses = losses_of(tmp_path / "tuned")
    assert losses[-1] < losses[0]
    assert GPT.from_pretrained(tmp_path / "tuned").head is None


def test_a_plan_measures_this_gpu(text, tmp_path, gpu, capfd):
    from tiedgpt.cli.main import main

    options = ["--minutes", "1", "--vocab-size", "300", "--device", str(gpu), "--format", "json"]
    assert main(["train", text, "--dry-run", *options]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["fits"] and facts["tokens_per_second"] > 0
