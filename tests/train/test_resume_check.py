import dataclasses

import pytest

from tests.train.trials import SERVER
from tiedgpt.cli.train import verify_resume
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.train.resume_check import check_resume


@pytest.mark.timeout(200)
def test_a_killed_and_resumed_run_is_proven_equal_to_an_unbroken_one_whatever_changes_in_it(
    options, tmp_path, monkeypatch
):
    monkeypatch.setattr("tiedgpt.train.resume_check.PROCESSES", SERVER)  # spawned ones start slowly
    said = []
    on_the_way = {"untie_at": 0.5, "batch_warmup": 0.5, "length_warmup": 0.5, "schedule": "wsd"}
    asked = dataclasses.replace(options, dropout=0.1, context=64, **on_the_way)
    unbroken, resumed = check_resume(asked, tmp_path / "run", said.append)
    assert unbroken == resumed
    assert set(unbroken) == {
        "model.safetensors", "optimizer.safetensors", "state.json", "metrics.jsonl",
    }  # fmt: skip
    assert any("SIGKILL" in line for line in said)
    assert not list(tmp_path.glob(".verify*")) and not (tmp_path / "run").exists()


def test_a_difference_is_a_failed_check_that_names_the_file(options, tmp_path, monkeypatch, capsys):
    one = {"state.json": "ab", "model.safetensors": "1"}
    other = one | {"model.safetensors": "2"}
    monkeypatch.setattr("tiedgpt.train.resume_check.check_resume", lambda *_: (one, other))
    with pytest.raises(CheckFailedError, match=r"differs .* in model\.safetensors:") as error:
        verify_resume(options, tmp_path / "run")
    assert error.value.exit_code == 6
    assert "model.safetensors      1 != 2" in capsys.readouterr().out


def test_standard_input_cannot_be_read_twice(options, tmp_path):
    with pytest.raises(UserError, match="standard input"):
        check_resume(dataclasses.replace(options, data=("-",)), tmp_path / "run")
