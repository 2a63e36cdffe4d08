"""Runs that are killed, started twice, or lose their disk or data: they resume to the same end."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.train.conftest import metrics
from tests.train.trials import KILLED, Command, Fault, left, operations
from tiedgpt.errors import CorruptInputError
from tiedgpt.train.store.checkpoint import list_checkpoints, verify


def fail_at(ready: Path, whole: Path, fault: Fault) -> int:
    """Fail or be killed, then go on with a good disk; return the exit code of the first command."""
    run = shutil.copytree(ready, ready.with_name(f"failed-{fault.at}"))
    command = Command(run, fault=fault)
    code, said = command.wait(), command.output()
    at = f"{operations(run)[fault.at]}: {said}"
    assert "Traceback" not in said, at
    if code == 0:  # it was passed over: a deletion that can wait
        assert left(run) == left(whole), at
    elif (kept := list_checkpoints(run / "checkpoints")) and len(kept) > 1:
        verify(kept[-2])
        verify(kept[-1])
    again = Command(run)
    assert again.wait() == 0, f"{at} {again.output()}"
    assert left(run) == left(whole), at
    assert not [path for path in run.rglob(".*.tmp-*")], at
    shutil.rmtree(run)
    return code


def test_a_full_disk_ends_the_run_with_code_4_and_keeps_the_checkpoints(ready, whole):
    every = len(operations(whole))
    codes = {
        fail_at(ready, whole, Fault(number, error=errno.ENOSPC, lasting=True))
        for number in range(7, every, every // 4)
    }
    assert codes == {4}


def test_a_disk_error_is_one_line_and_keeps_the_checkpoints(ready, whole):
    every = len(operations(whole))
    for number in range(11, every, every // 4):
        assert fail_at(ready, whole, Fault(number, error=errno.EIO)) in (0, 1, 3)


def test_a_run_killed_at_some_operation_of_the_disk_ends_the_same(ready, whole):
    every = operations(whole)
    assert len(every) > 100
    saved = next(n for n, what in enumerate(every) if "step-000006" in what)
    torn = [
        n for n, what in enumerate(every[:saved]) if "the rest of" in what and "metrics" in what
    ]
    for number in (torn[-1], *range(3, len(every), len(every) // 5)):  # in the line of step 6
        assert fail_at(ready, whole, Fault(number)) == KILLED


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("error", "lasting", "codes"),
    [
        (None, False, {KILLED}),
        (errno.ENOSPC, True, {0, 4}),
        (errno.ENOSPC, False, {0, 4}),
        (errno.EIO, False, {0, 1, 3}),
    ],
)
def test_a_kill_or_a_failing_disk_at_any_operation_loses_nothing(
    ready, whole, error, lasting, codes
):
    for number in range(len(operations(whole))):
        assert fail_at(ready, whole, Fault(number, error=error, lasting=lasting)) in codes


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", "flipped"),
        ("optimizer.safetensors", "cut"),
        ("state.json", "flipped"),
        ("manifest.json", "gone"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_result_is_the_same(ready, whole, file, damage):
    run = shutil.copytree(ready, ready.with_name("damaged"))
    lines = [
        n for n, what in enumerate(operations(whole)) if "open a" in what and "metrics" in what
    ]
    assert Command(run, fault=Fault(lines[5])).wait() == KILLED  # after 4 steps and an evaluation
    assert [p.name for p in list_checkpoints(run / "checkpoints")] == ["step-000002", "step-000004"]
    checkpoint = run / "checkpoints" / "step-000004"
    kept, path = [path.name for path in checkpoint.iterdir()], checkpoint / file
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    again = Command(run)
    assert again.wait() == 0, again.output()
    assert f"passed over a damaged checkpoint: {checkpoint}" in again.output()
    aside = checkpoint.with_name(checkpoint.name + ".damaged")
    assert f"kept as {aside}" in again.output()
    assert sorted(p.name for p in aside.iterdir()) == sorted(
        name for name in kept if damage != "gone" or name != file
    )
    assert left(run) == left(whole)


TINY = (
    *("--size", "tiny", "--tokenizer", "char", "--context", "16", "--batch-size", "2"),
    *("--dtype", "fp32"),
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_command_killed_two_hundred_times_ends_the_same(text_file, tmp_path):
    """Kill a command at any moment of its life, again and again; begin anew when it is done."""
    arguments = text_file, *TINY, "--steps", "12", "--dropout", "0.1"
    command = Command(whole := tmp_path / "unbroken", arguments)
    assert command.wait() == 0, command.output()
    chance, killed, runs = random.Random(5), 0, 0
    while killed < 200:
        run, runs = tmp_path / f"run-{runs}", runs + 1
        while True:
            command = Command(run, arguments)
            patience = chance.uniform(0, 1.0) if killed < 200 else None
            if (code := command.wait(patience)) is not None:
                assert code == 0, command.output()
                break
            command.kill()
            killed += 1
        assert left(run) == left(whole)
        shutil.rmtree(run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_two_simultaneous_trainings_trains_fifty_times(text_file, tmp_path):
    lost = 0
    for number in range(50):
        run = tmp_path / f"race-{number}"
        arguments = text_file, *TINY, "--steps", "3"
        first = Command(run, arguments)
        second = Command(run, arguments, name="second")
        codes = sorted([first.wait(), second.wait()])
        assert codes in ([0, 0], [0, 1]), (first.output(), second.output())
        lost += codes == [0, 1]
        assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3]
        verify(list_checkpoints(run / "checkpoints")[-1])
        shutil.rmtree(run)
    assert lost >= 25


def cut(path):
    os.truncate(path, 1024 + 10)


def grow(path):
    with path.open("ab") as file:
        file.write(b"\1\0" * 50)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [cut, grow, replace, lambda path: path.unlink()])
def test_data_that_changes_under_a_run_ends_it_in_one_line(trial, change):
    run = trial()
    shard = run.run.data / "train_000000.bin"
    with pytest.raises(CorruptInputError, match=r"train_000000\.bin changed while training"):
        run.train(track=lambda line: line["step"] == 3 and change(shard))
    (kept,) = list_checkpoints(run.run.checkpoints)
    assert kept.name == "step-000002"
    verify(kept)
