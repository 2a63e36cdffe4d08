"""Neighbours of a row, by three measures: against numpy, for one matrix and for two."""

import numpy as np
import pytest

from tests.inspect.conftest import random_model
from tiedgpt.inspect import neighbours


def by_hand(rows, id, top):
    """The three lists as numpy finds them."""
    centred = rows - rows.mean(0)
    length, centred_length = (np.linalg.norm(m, axis=1) for m in (rows, centred))
    values = {
        "dot": rows @ rows[id],
        "cos": rows @ rows[id] / (length * length[id]),
        "centred_cos": centred @ centred[id] / (centred_length * centred_length[id]),
    }
    for column in values.values():
        column[id] = -np.inf
    return {name: (np.argsort(-x)[:top], np.sort(x)[::-1][:top]) for name, x in values.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_neighbours_are_the_nearest_rows_without_the_token_itself(tied):
    model = random_model(tied=tied)
    found = neighbours(model, None, 5, top=7)
    weights = [model.wte.weight] if tied else [model.wte.weight, model.head.weight]
    assert [m.does for m in found.matrices] == (
        ["reads and predicts"] if tied else ["reads", "predicts"]
    )
    for matrix, weight in zip(found.matrices, weights, strict=True):
        for name, (ids, values) in by_hand(weight.detach().double().numpy(), 5, 7).items():
            assert getattr(matrix, f"{name}_ids").tolist() == ids.tolist()
            np.testing.assert_allclose(getattr(matrix, name), values, rtol=1e-5)
            assert 5 not in ids and all(int(id) in found.words for id in ids)


def test_a_token_is_an_id_or_its_text(model, tokenizer):
    (id,) = tokenizer.encode(" cat")
    assert (
        neighbours(model, tokenizer, " cat").to_json() == neighbours(model, tokenizer, id).to_json()
    )
    assert neighbours(model, tokenizer, id).piece == " cat" and neighbours(model).id == 0
    every = neighbours(model, tokenizer, id, top=10_000).matrices[0]
    assert len(every.dot_ids) == len(tokenizer) - 1
