"""`tiedgpt plot` and `train --track` as a user meets them."""

import json
import re
from pathlib import Path

import pytest

from tiedgpt.cli.main import main

QUICK = ["--size", "tiny", "--context", "16", "--batch-size", "2", "--tokenizer", "char"]


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "cats.txt"
    path.write_text("".join(f"{n} cats sat on {n % 5} mats.\n" for n in range(300)))
    return path


def write_run(path: Path, n: int = 40, last: str = "") -> None:
    """Write the metrics of a run of n steps."""
    path.mkdir(parents=True)
    lines = []
    for step in range(1, n + 1):
        speed = {"tokens": 64 * step, "tokens_per_second": 1000.0}
        lines.append({"step": step, "loss": 4 / step, "lr": 0.1, "grad_norm": 1.0, **speed})
        if step % 10 == 0:
            score = {"val_loss": 5 / step, "val_bits_per_byte": 2 / step}
            lines.append({"step": step, **score, "sample": f"text [{step}]"})
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + last)


def test_curves_of_finished_and_active_runs_are_drawn_in_the_terminal(text, capfd):
    write_run(Path("runs/cats"), last='{"step": 41, "lo')
    assert main(["plot"]) == 0
    out, err = capfd.readouterr()
    assert "newest run: runs/cats" in err
    assert "loss, nats" in out and "learning rate" in out and "bits per byte" in out
    assert "40" in out and "unfinished" in out
    assert max(map(len, out.splitlines())) <= 80
    assert sum("\u2800" < c < "\u28ff" for c in out) > 100


def test_several_runs_and_a_folder_of_runs_are_drawn_together(text, capfd):
    write_run(Path("both/one"))
    write_run(Path("both/two"), 30)
    assert main(["plot", "both", "--x", "seconds"]) == 0
    out = capfd.readouterr().out
    assert "1 one" in out and "2 two" in out and "seconds" in out
    assert main(["plot", "both/one", "both/two", "--out", "curves.svg"]) == 0
    assert "written   curves.svg" in capfd.readouterr().out
    drawn = Path("curves.svg").read_text()
    assert drawn.startswith("<?xml")


def test_numbers_and_samples_can_be_printed(text, capfd):
    write_run(Path("run"))
    assert main(["plot", "run", "--format", "json", "--x", "steps"]) == 0
    (found,) = json.loads(capfd.readouterr().out)
    assert found["curves"]["val_loss"] == {"x": [10, 20, 30, 40], "y": [0.5, 0.25, 5 / 30, 0.125]}
    assert main(["plot", "run", "--samples"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("run       4 samples\n\n--- step 10  validation loss 0.500\ntext [10]\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "train first"), (["run", "none"], "no metrics.jsonl"), (["empty"], "nothing to plot")],
)
def test_undrawable_runs_are_refused_in_one_line(text, capfd, arguments, says):
    write_run(Path("run"))
    write_run(Path("empty"), 0)
    assert main(["plot", *arguments]) == 1
    assert re.search(f"(?ms)^error: .*{says}", capfd.readouterr().err)


def test_a_missing_tracker_is_reported_before_any_work(text, capfd, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    assert main(["train", "cats.txt", *QUICK, "--steps", "4", "--track", "trackio"]) == 1
    assert "pip install trackio" in capfd.readouterr().err
    assert not Path("runs").exists()
