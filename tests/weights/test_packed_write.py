"""A packed directory is proven before it is kept, and looked into like any other checkpoint."""

from dataclasses import replace

import numpy as np
import pytest

from tiedgpt import GPT
from tiedgpt.errors import CheckFailedError
from tiedgpt.tie import audit, ledger
from tiedgpt.weights.convert import convert
from tiedgpt.weights.formats.packed import open_packed, writer
from tiedgpt.weights.load import load


@pytest.fixture
def source(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("precision", [None, "int4"])
def test_quantized_matrices_are_within_a_tolerance_that_is_told(source, tmp_path, precision):
    written = convert(load(source), tmp_path / "p", "packed", tokenizer=None, precision=precision)
    assert open_packed(tmp_path / "p").precision == (precision or "int8")
    assert not written.exact and 0 < written.difference < written.tolerance
    assert written.copies == 1


def test_what_does_not_come_back_as_it_was_is_not_kept(source, tmp_path, monkeypatch):
    def damaged(path):
        model = open_packed(path)
        arrays = {name: np.array(array) for name, array in model.arrays.items()}
        arrays["c_fc.weights"][1, 0, 3, 2, 1] ^= 1
        return replace(model, arrays=arrays)

    monkeypatch.setattr(writer, "open_packed", damaged)
    with pytest.raises(CheckFailedError, match=r"c_fc\.weights"):
        convert(load(source), tmp_path / "p", "packed", tokenizer=None)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_the_tie_is_seen_in_it(tiny, source, tmp_path):
    convert(load(source), tmp_path / "tied", "packed", tokenizer=None)
    assert audit(tmp_path / "tied").verdict == "tied"
    assert ledger(tmp_path / "tied").total == tiny.config.parameter_count()
    GPT(replace(tiny.config, tie_word_embeddings=False)).save_pretrained(tmp_path / "two")
    convert(load(tmp_path / "two"), tmp_path / "untied", "packed", tokenizer=None)
    assert audit(tmp_path / "untied").verdict == "untied as claimed"
