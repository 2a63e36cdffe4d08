"""Trackers receive the metrics and cannot harm a training."""

import sys
import types
from typing import get_args

import pytest

from tiedgpt.errors import UserError
from tiedgpt.train.events import Ended
from tiedgpt.train.store.metrics import TrackerName, Tracking, open_tracker, split_line


class Fake:
    """A tracker that records its calls, or fails on request."""

    def __init__(self, breaks: str = "") -> None:
        self.calls, self.breaks = [], breaks

    def _call(self, name, *values):
        self.calls.append((name, *values))
        if self.breaks == name:
            raise RuntimeError("no\nnetwork")

    def start(self, run, config, step):
        self._call("start", step)
        return self.log, self.finish

    def log(self, values, texts, step):
        self._call("log", step, values, texts)

    def finish(self):
        self._call("finish")


def test_a_tracker_receives_the_metrics_in_order(trial):
    run, fake, warnings = trial(), Fake(), []
    with Tracking("Fake", fake.start, run.run.path, {}, warn=warnings.append) as tracking:
        *_, ended = run.train(track=tracking.log)
    assert isinstance(ended, Ended) and not warnings
    names = [call[0] for call in fake.calls]
    assert names == ["start", *["log"] * (run.plan.steps + 2), "finish"]
    assert fake.calls[0] == ("start", 0)
    logged = fake.calls[1:-1]
    assert [call[1] for call in logged] == [1, 2, 3, 4, 4, 5, 6, 6]
    assert logged[0][2]["loss"] > 0 and "grad_norm_w_input" in logged[0][2]
    assert logged[4][3]["sample"] and "val_loss" in logged[4][2]
    assert "final" not in logged[-1][2]


@pytest.mark.parametrize("breaks", ["start", "log", "finish"])
def test_a_failing_tracker_is_reported_once_and_not_called_again(tmp_path, breaks):
    fake, warnings = Fake(breaks), []
    with Tracking("Fake", fake.start, tmp_path, {}, warn=warnings.append) as tracking:
        for step in range(1, 4):
            tracking.log({"step": step, "loss": 1.0})
    assert warnings == ["Fake failed and is given no more metrics (RuntimeError: no network)"]
    assert [call[0] for call in fake.calls].count(breaks) == 1
    assert fake.calls[-1][0] == breaks


def test_only_finite_numbers_and_texts_are_logged():
    line = {"step": 3, "final": True, "loss": float("nan"), "lr": 1, "sample": "a", "x": None}
    assert split_line(line) == ({"lr": 1.0}, {"sample": "a"})


@pytest.mark.parametrize("package", [None, types.ModuleType("a_folder")], ids=["none", "folder"])
@pytest.mark.parametrize("name", get_args(TrackerName))
def test_a_missing_package_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(UserError, match=f"pip install {name}"):
        open_tracker(name)


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_resumed_run_keeps_its_name(monkeypatch, tmp_path, name):
    calls = []
    module = types.ModuleType(name)
    module.__file__ = "fake.py"

    def init(**options):
        calls.append(options)
        return module

    module.init = init
    module.log = lambda metrics, step: calls.append((step, metrics))
    module.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "run.toml").write_text("[options]\nseed = 1\n")
    for step in (0, 7):
        log, finish = open_tracker(name)(tmp_path, {"training": {"lr": 0.1, "data": ["a"]}}, step)
        log({"loss": 1.0}, {"sample": "a"}, step + 1)
        finish()
    first, logged, finished, again, *_ = calls
    assert first == again and first["resume"] == "allow" and first["project"] == "tiedgpt"
    assert logged == (1, {"loss": 1.0, "sample": "a"}) and finished == "finish"


def test_tensorboard_hides_later_steps_of_an_earlier_call(monkeypatch, tmp_path):
    calls = []

    class SummaryWriter:
        def __init__(self, directory, purge_step):
            calls.append((directory, purge_step))

        def __getattr__(self, name):
            return lambda *values, **options: calls.append((name, *values, options))

    package = types.ModuleType("tensorboard")
    package.__file__ = "fake.py"
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    log, finish = open_tracker("tensorboard")(tmp_path, {"training": {"lr": 0.1}}, 7)
    log({"loss": 1.0}, {"sample": "a"}, 8)
    finish()
    assert calls[0] == (str(tmp_path / "tensorboard"), 8)
    assert calls[1][2] == "    training.lr = 0.1\n"
    assert calls[2:] == [
        ("add_scalar", "loss", 1.0, {"global_step": 8}),
        ("add_text", "sample", "a", {"global_step": 8}),
        ("close", {}),
    ]
