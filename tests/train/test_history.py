"""Metrics as columns, whole, torn or damaged."""

import json
import math

import pytest

from tiedgpt.errors import UserError
from tiedgpt.train.store.metrics import parse_history, read_history


def step(n, **more):
    line = {"step": n, "loss": 5.0 - n, "tokens": 100 * n, "tokens_per_second": 50.0}
    return json.dumps(line | more)


TEXT = "\n".join(
    [
        step(1),
        step(2, tokens_per_second=100.0),
        json.dumps({"step": 2, "val_loss": 3.5, "sample": "a \u2028 b"}),
        json.dumps({"step": 3, "skipped": "loss nan", "lr": 0.1, "tokens": 300}),
        step(4),
        json.dumps({"step": 4, "final": True, "val_loss": 3.0, "part_val_loss": 3.25}),
    ]
)


def test_each_key_is_a_column_over_tokens_steps_and_seconds():
    found = parse_history("run", TEXT)
    assert found.series("loss", "steps") == ([1, 2, 4], [4, 3, 1])
    assert found.series("loss", "tokens") == ([100, 200, 400], [4, 3, 1])
    assert found.series("loss", "seconds") == ([2.0, 3.0, 5.0], [4, 3, 1])
    assert (found.step, found.units, found.seconds, found.skipped) == (4, 400, 5.0, 1)
    assert found.samples == {2: "a \u2028 b"}


def test_the_final_score_is_whole_and_its_curve_point_is_the_sampled_part():
    found = parse_history("run", TEXT)
    assert found.finished and found.last("val_loss") == 3.0
    assert found.series("val_loss", "steps") == ([2, 4], [3.5, 3.25])
    old = parse_history("old", '{"step": 9, "final": true, "val_loss": 2.0}')
    assert old.last("val_loss") == 2.0


def test_truncated_and_foreign_lines_are_skipped():
    torn = TEXT.rsplit("\n", 1)[0] + '\n{"step": 5, "lo'
    found = parse_history("run", f"\n[1]\nnull\n{{}}\n{torn}")
    assert (found.step, found.finished) == (4, False)
    assert found.last("val_loss") == 3.5


def test_a_run_may_be_empty_and_its_losses_need_not_be_finite(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    empty = read_history(tmp_path)
    assert (empty.step, empty.units, empty.seconds, empty.last("loss")) == (0, 0, 0.0, None)
    assert empty.series("loss", "seconds") == ([], [])
    assert math.isnan(parse_history("run", '{"step": 1, "loss": NaN}').last("loss"))


def test_examples_are_counted_if_they_are_the_unit():
    found = parse_history("head", '{"step": 2, "loss": 1.0, "examples": 64}')
    assert found.unit == "examples" and found.series("loss", "tokens") == ([64], [1.0])


def test_other_directories_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        read_history(tmp_path / "nothing")
