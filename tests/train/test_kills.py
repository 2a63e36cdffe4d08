"""Runs that are killed, started twice, or lose their data under them."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.train.conftest import metrics
from tests.train.trials import KILLED, Command, Fault, left, operations
from tiedgpt.errors import CorruptInputError
from tiedgpt.train.checkpoint import list_checkpoints, verify

TINY = (
    *("--size", "tiny", "--tokenizer", "char", "--context", "16", "--batch-size", "2"),
    *("--dtype", "fp32"),
)


def kill_at(ready: Path, whole: Path, number: int) -> None:
    run = shutil.copytree(ready, ready.with_name(f"killed-{number}"))
    assert Command(run, fault=Fault(number)).wait() == KILLED
    command = Command(run)
    assert command.wait() == 0, command.output()
    assert left(run) == left(whole), f"killed at {operations(run)[-1]}"
    assert not [path for path in run.rglob(".*.tmp-*")]
    shutil.rmtree(run)


def test_a_run_killed_at_some_operation_of_the_disk_ends_the_same(ready, whole):
    every = operations(whole)
    assert len(every) > 100
    saved = next(n for n, what in enumerate(every) if "step-000006" in what)
    torn = [
        n for n, what in enumerate(every[:saved]) if "the rest of" in what and "metrics" in what
    ]
    for number in (torn[-1], *range(3, len(every), len(every) // 5)):  # in the line of step 6
        kill_at(ready, whole, number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_at_any_operation_of_the_disk_ends_the_same(ready, whole):
    for number in range(len(operations(whole))):
        kill_at(ready, whole, number)


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
