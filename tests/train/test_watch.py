"""A process that hangs or ends, ends the run, and is named."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.train.conftest import CPU, reopen_trial
from tests.train.test_parallel import copy_run, together
from tiedgpt.errors import TiedGPTError
from tiedgpt.train.parallel import join_world
from tiedgpt.train.storage import RunDirectory

TIMEOUT = 4.0


def train(path, hangs=None):
    """Train; what is said on stderr goes to a file. One process may hang as it reads a batch."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(f"{path}.log-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)
    try:
        with join_world("ddp", CPU, TIMEOUT) as world:
            trial = reopen_trial(path)
            batches = trial.data.batches

            def slow(batch_size, seed):
                batch = batches(batch_size, seed)
                return lambda step: time.sleep(60) if step == 3 else batch(step)

            if rank == hangs:
                trial = replace(trial, data=replace(trial.data, batches=slow))
            trial.train(world=world)
    except TiedGPTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


@pytest.fixture
def long_run(ready):
    return copy_run(ready, "long", steps=100_000, eval_every=50_000, save_every=50_000)


def send(number, path, rank):
    """Return what sends a signal to a process in the midst of training."""

    def act(processes):
        give_up = time.monotonic() + 60
        while len(RunDirectory(path).read_metrics()) < 3:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        time.sleep(TIMEOUT / 4)  # until it has told what it does
        os.kill(processes[rank].pid, number)
        if number == signal.SIGSTOP:
            processes[1 - rank].join(60)
            processes[rank].kill()

    return act


def said(path):
    return "".join(log.read_text() for log in path.parent.glob(f"{path.name}.log-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_ends_the_run_and_is_named(long_run, number):
    began = time.monotonic()
    codes = together(train, long_run, act=send(number, long_run, 1))
    assert codes == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 30
    assert said(long_run).count("error: rank 1 is lost") == 1
    assert ", step " in said(long_run) and "newest checkpoint" in said(long_run)


def test_the_first_process_is_named_when_it_is_killed(long_run):
    assert together(train, long_run, act=send(signal.SIGKILL, long_run, 0)) == [-signal.SIGKILL, 1]
    assert said(long_run).count("error: ") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_is_named_with_what_it_does(long_run, rank):
    codes = together(train, long_run, rank)
    assert all(codes)
    assert f"error: rank {rank} hangs" in said(long_run)
    assert "reading the batch, step 4" in said(long_run)


def come_alone():
    os.environ["WORLD_SIZE"] = "2"
    try:
        with join_world("ddp", CPU, 1.0):
            return 0
    except TiedGPTError as error:
        return 1 if "rank 1 did not start" in str(error) else 2


def test_a_process_that_never_comes_is_named():
    assert together(come_alone, size=1) == [1]


def torchrun(*arguments):
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    return subprocess.Popen(
        [sys.executable, *command, "-m", "tiedgpt", "train", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def children(pid):
    """Return the processes that torchrun started, by their rank."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_a_run_again_that_lost_a_process(tmp_path, text_file, number, rank):
    run = tmp_path / "run"
    process = torchrun(
        *(text_file, "--out", run, "--size", "tiny", "--tokenizer", "char", "--context", "16"),
        *("--steps", "400", "--batch-size", "4", "--dtype", "fp32", "--parallel", "fsdp"),
        *("--timeout", "0.1"),
    )
    while not (run / "checkpoints" / "latest").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(children(process.pid)[rank], number)
    _, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    assert f"error: rank {rank} is lost" in errors
    assert errors.count("resuming after step") == 1
    assert RunDirectory(run).is_finished()
