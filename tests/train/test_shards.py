"""Checkpoints of a sharded model: each process writes its parts, and any number reads them."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.train.conftest import CPU, DROPOUT, metrics, reopen_trial
from tests.train.test_parallel import copy_run, go_on, together
from tests.train.trials import KILLED, Fault, left, operations
from tiedgpt.errors import EXIT_INTERRUPTED, NoRoomError
from tiedgpt.train.distributed import join_processes
from tiedgpt.train.events import Ended
from tiedgpt.train.store.checkpoint import list_checkpoints, verify
from tiedgpt.train.store.directory import RunDirectory

PARTS = 4
"""Operations at which a checkpoint is killed."""


def go_on_until(path, fault, rank, stop_after=None):
    """Train the run at `path` in shards, with a fault in one of the processes."""
    if fault is not None and os.environ["RANK"] == str(rank):
        fault(path)
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(join_processes("fsdp", CPU))
        if processes.is_main:
            stack.enter_context(RunDirectory(path).lock())
        processes.on_main(lambda: None)
        ended = reopen_trial(path).train(stop_after, processes=processes)[-1]
        assert isinstance(ended, Ended)
    return 0


def with_exit_code(*arguments):
    """End as the command line ends, on our own errors."""
    try:
        return go_on_until(*arguments)
    except NoRoomError as error:
        return error.exit_code


@pytest.fixture(scope="module")
def plain(ready_once, tmp_path_factory):
    """A run without dropout, whose losses are those of any number of processes."""
    where = shutil.copytree(ready_once, tmp_path_factory.mktemp("plain") / "ready")
    plan = {"batch_size": 5, "micro_batch": 1, "optimizer": "adamw", "lr": 1e-3}
    return copy_run(where, "plain", config=dict.fromkeys(DROPOUT, 0.0), **plan)


@pytest.fixture(scope="module")
def stopped(plain):
    """The run after four of six steps, in two processes with sharded matrices."""
    path = shutil.copytree(plain, plain.with_name("stopped"))
    assert together(go_on, path, "fsdp", 4) == [EXIT_INTERRUPTED] * 2
    return path


def losses(run: Path) -> list[float]:
    """Return the losses of the steps and of the evaluations."""
    names = "loss", "val_loss"
    return [line[name] for line in metrics(run) for name in names if name in line]


@pytest.fixture(scope="module")
def one(plain):
    """The losses of one process that never stops."""
    path = shutil.copytree(plain, plain.with_name("one"))
    assert go_on(path, None, None) == 0
    return losses(path)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_of_two_processes_load_in_one_two_and_four(stopped, one, size):
    path = shutil.copytree(stopped, stopped.with_name(f"in-{size}"))
    codes = (
        [go_on(path, None, None)] if size == 1 else together(go_on, path, "fsdp", None, size=size)
    )
    assert codes == [0] * size
    assert losses(path) == pytest.approx(one, abs=2e-6)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_checkpoint_of_one_process_loads_in_two(plain, one, strategy):
    path = shutil.copytree(plain, plain.with_name(f"whole-{strategy}"))
    assert go_on(path, None, 3) == EXIT_INTERRUPTED
    assert together(go_on, path, strategy, None) == [0, 0]
    assert losses(path) == pytest.approx(one, abs=2e-6)


def test_each_process_writes_its_shard_and_no_file_is_a_pickle(stopped):
    checkpoint = list_checkpoints(stopped / "checkpoints")[-1]
    *others, first, second = sorted(checkpoint.iterdir(), key=lambda file: file.suffix)
    assert {file.name for file in others} == {"manifest.json", "state.json"}
    assert first.suffix == second.suffix == ".safetensors"
    assert verify(checkpoint).keys() == {"state.json", first.name, second.name}
    assert 0.8 < first.stat().st_size / second.stat().st_size < 1.25
    for file in (first, second):
        data = file.read_bytes()
        header = int.from_bytes(data[:8], "little")
        names = json.loads(data[8 : 8 + header]).keys()
        assert "wte.weight" in names and "wte.weight/exp_avg" in names


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("is_in_manifest", [True, False])
def test_a_checkpoint_that_lacks_a_shard_is_skipped(stopped, one, tmp_path, which, is_in_manifest):
    run = shutil.copytree(stopped, tmp_path / "run")
    newest = list_checkpoints(run / "checkpoints")[-1]
    shard = sorted(newest.glob("*.safetensors"))[which]
    shard.unlink()
    if not is_in_manifest:
        manifest = json.loads((newest / "manifest.json").read_text())
        del manifest[shard.name]
        (newest / "manifest.json").write_text(json.dumps(manifest))
    events = reopen_trial(run).train()
    said = " ".join(note for event in events for note in getattr(event, "notes", []))
    assert f"passed over a damaged checkpoint: {newest}" in said
    assert losses(run) == pytest.approx(one, abs=2e-6)


def test_a_checkpoint_without_optimizer_state_is_not_loaded(trial):
    run = trial()
    run.train(4)
    path = run.newest("manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["optimizer.safetensors"]
    path.write_text(json.dumps(manifest))
    run.newest("optimizer.safetensors").unlink()
    said = " ".join(note for event in run.train() for note in getattr(event, "notes", []))
    assert "lacks the state of the random stream" in said


def kill_at(plain, whole, number, rank):
    run = shutil.copytree(plain, plain.with_name(f"killed-{rank}-{number}"))
    codes = together(with_exit_code, run, Fault(number), rank)
    assert codes[rank] == KILLED and codes[1 - rank] != 0
    for path in list_checkpoints(run / "checkpoints"):
        verify(path)
    at = operations(run)[-1]
    assert together(with_exit_code, run, None, rank) == [0, 0], at
    assert left(run) == left(whole), at
    assert not [path for path in run.rglob(".*.tmp-*")], at
    shutil.rmtree(run)


@pytest.fixture(scope="module")
def unbroken(plain):
    """The run in two processes that never stop, with the operations of each."""
    found = {}
    for rank in (0, 1):
        path = shutil.copytree(plain, plain.with_name(f"unbroken-{rank}"))
        assert together(with_exit_code, path, Fault(None), rank) == [0, 0]
        every = operations(path)
        begin = next(n for n, what in enumerate(every) if "step-000004" in what)
        end = next(n for n, what in enumerate(every) if "step-000006" in what)
        found[rank] = range(begin, end)
    return path, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_sharded_run_killed_at_any_operation_ends_the_same(plain, unbroken, rank, part):
    whole, every = unbroken
    for number in every[rank][part::PARTS]:
        kill_at(plain, whole, number, rank)


@pytest.mark.slow
def test_a_full_disk_in_one_process_ends_all_and_the_run_resumes(plain, unbroken):
    whole, every = unbroken
    run = shutil.copytree(plain, plain.with_name("full"))
    fault = Fault(every[1][1], error=errno.ENOSPC)
    assert together(with_exit_code, run, fault, 1) == [NoRoomError.exit_code] * 2
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-000002"]
    assert together(with_exit_code, run, None, 1) == [0, 0]
    assert left(run) == left(whole)
