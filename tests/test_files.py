"""Files on systems that we do not have: what Windows would refuse is not asked for."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tiedgpt import files


@pytest.fixture
def windows(monkeypatch):
    """The module `os` on Windows, where signal 0 ends a process."""
    opened = []

    def kill(pid, number):
        raise AssertionError(f"process {pid} would have been ended")

    def open_descriptor(path, flags):
        opened.append(flags)
        return os.open(path, flags)

    there = SimpleNamespace(**{**vars(os), "name": "nt", "kill": kill, "open": open_descriptor})
    monkeypatch.setattr(files, "os", there)
    return opened


def test_a_file_is_opened_for_writing_to_sync_on_windows(windows, tmp_path):
    files.write_json(tmp_path / "a.json", {"a": 1})
    assert files.read_json(tmp_path / "a.json") == {"a": 1}
    assert windows == [os.O_RDWR]  # the file, and not its directory


def test_a_process_is_never_signalled_on_windows(windows):
    assert files.is_running(os.getpid()) and files.is_running(1 << 22)


def test_running_and_ended_processes_are_distinguished():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not files.is_running(process.pid)
    assert files.is_running(os.getpid()) and files.is_running(1)


def test_a_file_is_not_locked_where_the_system_has_no_such_locks(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        assert files.lock_file(first) and not files.lock_file(second)
        monkeypatch.setattr(files, "fcntl", None)
        assert files.lock_file(second)
