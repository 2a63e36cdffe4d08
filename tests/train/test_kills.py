"""Runs that are killed, wherever that may be, end as they would have without."""

import random
import shutil
from pathlib import Path

import pytest

from tests.train.trials import Command, Fault, left

KILLED = -9
ARGUMENTS = (
    *("--size", "tiny", "--tokenizer", "char", "--context", "16", "--batch-size", "2"),
    *("--steps", "12", "--dtype", "fp32", "--dropout", "0.1"),
)


def operations(run: Path) -> list[str]:
    return Path(f"{run}.operations").read_text().splitlines()


def kill_at(ready: Path, whole: Path, number: int) -> None:
    run = shutil.copytree(ready, ready.with_name(f"killed-{number}"))
    assert Command(run, fault=Fault(number)).wait() == KILLED
    command = Command(run)
    assert command.wait() == 0, command.output()
    assert left(run) == left(whole), f"killed at {operations(run)[-1]}"
    assert not [path for path in run.rglob(".*.tmp-*")]
    shutil.rmtree(run)


def kill_at_random(text_file: Path, tmp_path: Path, kills: int, whole: Path) -> None:
    """Kill a whole command again and again, at any moment of its life; begin anew when done."""
    chance, killed, runs = random.Random(5), 0, 0
    while killed < kills:
        run, runs = tmp_path / f"run-{runs}", runs + 1
        while True:
            command = Command(run, (text_file, *ARGUMENTS))
            patience = chance.uniform(0, 1.0) if killed < kills else None
            if (code := command.wait(patience)) is not None:
                assert code == 0, command.output()
                break
            command.kill()
            killed += 1
        assert left(run) == left(whole)
        shutil.rmtree(run)


@pytest.fixture
def whole_command(text_file, tmp_path) -> Path:
    run = tmp_path / "unbroken"
    command = Command(run, (text_file, *ARGUMENTS))
    assert command.wait() == 0, command.output()
    return run


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_command_killed_two_hundred_times_ends_the_same(text_file, tmp_path, whole_command):
    kill_at_random(text_file, tmp_path, 200, whole_command)


def test_a_run_killed_at_some_operation_of_the_disk_ends_the_same(ready, whole):
    every = len(operations(whole))
    assert every > 100
    for number in range(3, every, every // 5):
        kill_at(ready, whole, number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_at_any_operation_of_the_disk_ends_the_same(ready, whole):
    for number in range(len(operations(whole))):
        kill_at(ready, whole, number)
