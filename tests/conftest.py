"""Settings of pytest; `models.py` has the models that tests share."""

import gc
import os
from collections.abc import Generator
from importlib import import_module

import pytest

gc.disable()  # until the tests are collected
if os.access("/dev/shm", os.W_OK):
    # `tmp_path` in memory: a file is renamed in a tenth of the time, and tests rename thousands
    shm = os.statvfs("/dev/shm")
    if shm.f_bavail * shm.f_frsize > 4 << 30 and not shm.f_flag & os.ST_NOEXEC:  # loads kernels
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    """Import torch and what tests share, but not in a process that only starts others."""
    if hasattr(config, "workerinput") or config.getoption("dist") == "no":
        config.pluginmanager.register(import_module("tests.models"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the modules and the tests, which stay to the end, out of later garbage collections.

    These are rare: by Python's limits they take 4 % of the time of the tests.
    """
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs in as many processes as there are cores, chosen files in this one."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return min(4, os.cpu_count() or 1) if whole else 0
