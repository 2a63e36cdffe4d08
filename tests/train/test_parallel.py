import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.conftest import CPU, reopen_trial
from tests.train.trials import SERVER, left
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.train import run as train_command
from tiedgpt.errors import EXIT_INTERRUPTED, DivergedError, UserError
from tiedgpt.heads import SequenceClassifier
from tiedgpt.train.distributed import Processes, ShardedProcesses, is_launched, join_processes
from tiedgpt.train.events import Ended
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import Loss
from tiedgpt.train.step.optim.groups import optimizers, parameter_groups
from tiedgpt.train.step.step import train_step
from tiedgpt.train.store.directory import RunDirectory

PLAN = Plan(
    steps=6, batch_size=5, micro_batch=1, optimizer="adamw", lr=1e-3, warmup=1, weight_decay=0.1,
    grad_clip=0.1, dtype="fp32", seed=3, eval_every=4, eval_batches=2, save_every=2,
)  # fmt: skip
SHAPE = {
    **{"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2},
    **{"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
}


def as_process(rank, size, port, work, arguments):
    """Act as one of several processes started by torchrun."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    torch.set_num_threads(1)
    sys.exit(work(*arguments))


def together(work, *arguments, size=2):
    """Do work in several processes; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        SERVER.Process(target=as_process, args=(rank, size, port, work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    return [process.exitcode for process in processes]


def five_rows():
    """Rows, some with few targets."""
    ids = np.random.default_rng(0).integers(0, 31, (5, 9))
    targets = ids[:, 1:].copy()
    targets[0, :6] = targets[3, 2:] = -100
    return ids[:, :-1], targets


def language_model():
    return GPT(GPTConfig(**SHAPE, bias=False)), five_rows()


def classifier():
    model = SequenceClassifier(GPT(GPTConfig(**SHAPE, bias=False)), labels=["a", "b", "c"])
    lengths, labels = np.array([8, 3, 5, 8, 1]), np.array([0, 1, 2, 1, 0])
    return model, (five_rows()[0], lengths, labels)


def whole(tensor):
    """Return a tensor that may lie in parts, in one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def three_steps(processes, make):
    """Return losses, norms, the first step's gradients and the weights after three steps."""
    torch.manual_seed(7)
    model, batch = make()
    model = processes.place(model)
    rules = optimizers(parameter_groups(model, matrices="adamw", weight_decay=0.1), lr=1e-3)
    results, gradients = [], {}
    for step in range(3):
        results.append(train_step(model, rules, batch, PLAN, processes))
        if step == 0:
            gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    losses, norms = ([getattr(r, name) for r in results] for name in ("loss", "grad_norm"))
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def exchanges(processes):
    """Return how often DDP exchanges gradients in a step of three parts."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    count = []
    model, batch = language_model()
    processes.place(model)
    processes.loss_module(model).register_comm_hook(
        None, lambda state, bucket: (count.append(1), allreduce_hook(None, bucket))[1]
    )
    train_step(model, [], batch, PLAN, processes)
    train_step(model, [], batch, PLAN, processes)
    return len(count)


class Poisoned(Loss):
    """A loss that is never finite."""

    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


def skipped(processes):
    """Return whether weights stay where the loss is not finite in the last process alone."""
    torch.manual_seed(7)
    model, batch = language_model()
    processes.place(model)
    rules = optimizers(parameter_groups(model, matrices="adamw", weight_decay=0.1), lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objective = Poisoned() if not processes.is_main else Loss()
    try:
        train_step(model, rules, batch, PLAN, processes, objective=objective)
    except DivergedError:
        same = (bool((before[name] == p).all()) for name, p in model.named_parameters())
        return all([*same])
    return False


def muon(processes):
    """Return matrices after Muon on parts, and after Muon on the same matrices whole."""
    found = []
    for place in (processes, Processes(CPU)):
        torch.manual_seed(7)
        model = place.place(GPT(GPTConfig(**SHAPE)))
        groups = parameter_groups(model, matrices="muon", weight_decay=0.1)
        rules = optimizers(groups, lr=1e-2, is_sharded=place.n_shards > 1)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.5 + 0.01
            for rule in rules:
                rule.step()
        found.append({name: whole(p.detach()) for name, p in model.named_parameters()})
    return found


def do_steps(path):
    with join_processes("ddp", CPU) as replicas:
        found = {}
        for kind, processes in (("ddp", replicas), ("fsdp", ShardedProcesses(CPU))):
            found[f"{kind} lm"] = three_steps(processes, language_model)
            found[f"{kind} classify"] = three_steps(processes, classifier)
            found[f"{kind} skipped"] = skipped(processes)
            if kind == "ddp":
                found["exchanges"] = exchanges(processes)
            else:
                found["muon"] = muon(processes)
            processes.release()
        torch.save(found, f"{path}-{replicas.rank}")
    return 0


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "found"
    assert together(do_steps, path) == [0, 0]
    return torch.load(f"{path}-0"), torch.load(f"{path}-1")


@pytest.mark.parametrize("make", [language_model, classifier])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_with_uneven_shares_step_like_one_process(stepped, kind, make):
    here = three_steps(Processes(CPU), make)
    what = "lm" if make is language_model else "classify"
    there = stepped[0][f"{kind} {what}"]
    torch.testing.assert_close(there["losses"], here["losses"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(there["norms"], here["norms"], atol=1e-6, rtol=1e-6)
    assert there["losses"] == stepped[1][f"{kind} {what}"]["losses"]  # agreed, bit for bit
    for name in here["weights"]:
        for part in ("gradients", "weights"):
            torch.testing.assert_close(
                there[part][name], here[part][name], atol=1e-6, rtol=0, msg=f"{part} of {name}"
            )


def test_gradients_are_reduced_once_per_step(stepped):
    assert stepped[0]["exchanges"] == 2  # in two steps of three parts each


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_processes_skip_a_step_that_is_not_finite_in_one(stepped, kind):
    assert [found[f"{kind} skipped"] for found in stepped] == [True, True]


def test_sharded_muon_updates_each_matrix_as_a_whole(stepped):
    parts, whole = stepped[0]["muon"]
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def go_on(path, kind, stop_after):
    """Train the run at `path` up to a step, in however many processes there are."""
    with join_processes(kind, CPU) as processes:
        ended = reopen_trial(path).train(stop_after, processes=processes)[-1]
        assert isinstance(ended, Ended)
    return 0 if ended.finished else EXIT_INTERRUPTED


def copy_run(ready, name, *, config=None, **plan):
    """Copy the run that is ready, with another config and another plan."""
    run = RunDirectory(shutil.copytree(ready, ready.with_name(name)))
    tables = run.read_record()
    changes = {"model": config or {}, "training": plan}
    run.write_record(tables | {key: tables[key] | new for key, new in changes.items()})
    return run.path


def lose_a_process(path, rank):
    """Train in two processes and kill one at its fourth batch."""
    os.dup2(os.open(f"{path}.log-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    with join_processes("ddp", CPU) as processes:
        trial = reopen_trial(path)
        batches = trial.data.batches

        def read_batch(batch_size, seed):
            batch = batches(batch_size, seed)
            return lambda step: os.kill(os.getpid(), 9) if step == 3 else batch(step)

        if processes.rank == rank:
            trial.data = replace(trial.data, batches=read_batch)
        trial.train(processes=processes)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others(ready, rank):
    codes = together(lose_a_process, ready, rank)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] not in (0, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_with_the_same_number_of_processes_a_run_resumes_bit_for_bit(ready, kind):
    whole, parts = copy_run(ready, "all"), copy_run(ready, "parts")
    assert together(go_on, whole, kind, None) == [0, 0]
    assert together(go_on, parts, kind, 3) == [EXIT_INTERRUPTED] * 2
    assert together(go_on, parts, kind, None) == [0, 0]
    assert left(whole) == left(parts)


def test_options_that_exclude_several_processes_are_refused(monkeypatch, tmp_path, text_file):
    assert not is_launched()
    with pytest.raises(UserError, match="torchrun --nproc-per-node"):
        train_command([str(text_file), "--parallel", "fsdp", "--out", str(tmp_path / "run")])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:  # the first process says it
        train_command([str(text_file), "--size", "huge"])
    assert ended.value.code == 1


def torchrun(*arguments, max_restarts=0):
    """Start `tiedgpt train` in two processes."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    command += ("--max-restarts", str(max_restarts))
    return subprocess.Popen(
        [sys.executable, *command, "-m", "tiedgpt", "train", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


SMALL = (
    *("--size", "tiny", "--tokenizer", "char", "--context", "16", "--steps", "120"),
    *("--batch-size", "3", "--dtype", "fp32", "--parallel", "fsdp"),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_reports_once_stops_on_a_signal_and_resumes(tmp_path, text_file):
    run = tmp_path / "run"
    process = torchrun(text_file, "--out", run, *SMALL)
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert err.count("stopped and saved after step") == 1
    assert not RunDirectory(run).is_finished()
    out, err = torchrun(text_file, "--out", run, *SMALL).communicate(timeout=200)
    assert err.count("resuming after step") == 1 and out.count("validation loss") == 1
    assert RunDirectory(run).is_finished()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_with_fewer_rows_than_processes_is_refused_once(tmp_path, text_file):
    process = torchrun(text_file, "--out", tmp_path / "none", "--batch-size", "1", "--steps", "2")
    _, err = process.communicate(timeout=200)
    assert "a batch of 1 row for 2 processes" in err
    assert "RuntimeError" not in err and not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_run_that_lost_a_process(tmp_path, text_file, rank):
    run = tmp_path / "run"
    process = torchrun(text_file, "--out", run, *SMALL, max_restarts=1)
    while not (run / "checkpoints" / "latest").exists():
        assert process.poll() is None
        time.sleep(0.05)
    pids = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    )
    os.kill([int(line) for line in pids.stdout.split()][rank], signal.SIGKILL)
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert err.count("resuming after step") == 1
    assert RunDirectory(run).is_finished()
