"""Two trainings in one directory, and data that changes under a run."""

import os
import shutil

import pytest

from tests.train.conftest import metrics
from tests.train.trials import Command
from tiedgpt.errors import CorruptInputError
from tiedgpt.train.checkpoint import list_checkpoints, verify

ARGUMENTS = (
    *("--size", "tiny", "--tokenizer", "char", "--context", "16", "--batch-size", "2"),
    *("--steps", "3", "--dtype", "fp32"),
)


def race(text_file, tmp_path, times):
    """Start the same command twice at once: one trains, and the other is told so."""
    lost = 0
    for number in range(times):
        run = tmp_path / f"race-{number}"
        first = Command(run, (text_file, *ARGUMENTS))
        second = Command(run, (text_file, *ARGUMENTS), name="second")
        codes = sorted([first.wait(), second.wait()])
        assert codes in ([0, 0], [0, 1]), (first.output(), second.output())
        lost += codes == [0, 1]
        steps = [line["step"] for line in metrics(run) if "loss" in line]
        assert steps == [1, 2, 3]
        verify(list_checkpoints(run / "checkpoints")[-1])
        shutil.rmtree(run)
    return lost


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_two_simultaneous_trainings_trains_fifty_times(text_file, tmp_path):
    assert race(text_file, tmp_path, 50) >= 25


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
