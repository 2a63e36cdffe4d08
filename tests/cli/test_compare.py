import dataclasses
from pathlib import Path

import pytest

from tiedgpt.cli.compare import Recipe, as_long, read_recipes
from tiedgpt.cli.train import Arguments
from tiedgpt.train.options import TrainOptions


def test_recipes_are_of_one_size_and_a_model_to_start_from_has_its_own():
    for more, size in (({}, "mini"), ({"start": "gpt2"}, "auto"), ({"fork": "runs/x-1"}, "auto")):
        given = Arguments(data=("x.txt",), compare=("--lr 1e-3",), **more)
        assert [recipe.options.size for recipe in read_recipes(given)] == [size, size]


@pytest.mark.parametrize(
    ("grows", "steps"),
    [
        ({}, 100),
        ({"batch_size": 32}, 50),
        ({"batch_warmup": 1.0}, 160),
        ({"length_warmup": 0.5}, 126),
    ],
)
def test_a_recipe_whose_batches_grow_trains_longer_on_as_many_tokens(
    grows, steps, tmp_path, monkeypatch
):
    """Batches of 2, 3 .. 8 eighths: 5 / 8 on average; rows of 3 .. 16 sixteenths: 9.5 / 16."""
    (tmp_path / "run.toml").write_text("[training]\nsteps = 100\n")
    base = TrainOptions(size="tiny", batch_size=16, context=256)
    first = Recipe("first", base, Path(tmp_path), says_length=False)
    assert as_long(dataclasses.replace(base, **grows), first).steps == steps
