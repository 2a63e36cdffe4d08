"""However ids are read, the scores are the same to the last bit."""

import random

import numpy as np
import pytest

from tests.infer.kernels.conftest import made
from tiedgpt.errors import UserError
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.weights.formats.packed.panels import PRECISIONS
from tiedgpt.weights.formats.packed.writer import pack_gpt

LENGTHS = (24, 1, 5, 10)
dice = random.Random(0)
TEXTS = [[dice.randrange(97) for _ in range(n)] for n in LENGTHS]


def runner(form, *, threads=2, **changes):
    changes = {"attention_windows": (0, 7)} | changes
    return PackedRunner(pack_gpt(made(**changes), form), threads=threads)


def whole(runner, texts):
    session = runner.session(n_slots=len(texts), capacity=24)
    return [
        logits.copy()
        for logits in session.read(range(len(texts)), texts, all_logits=range(len(texts)))
    ]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", PRECISIONS)
def test_texts_read_together_alone_and_token_by_token_score_the_same_bits(form):
    kernels = runner(form)
    together = whole(kernels, TEXTS)
    assert_same([whole(kernels, [text])[0] for text in TEXTS], together)
    session = kernels.session(n_slots=1, capacity=24)
    steps = [session.read([0], [[token]])[0].copy() for token in TEXTS[0]]
    assert_same([np.concatenate(steps)], together[:1])
    session = kernels.session(n_slots=4, capacity=24)
    some = session.read(range(4), TEXTS, all_logits=[2])
    assert_same(some, [scores if n == 2 else scores[-1:] for n, scores in enumerate(together)])


@pytest.mark.parametrize("form", PRECISIONS)
def test_any_number_of_threads_gives_the_same_bits(form):
    expected = whole(runner(form, threads=1), TEXTS)
    for threads in (2, 3, 4):
        assert_same(whole(runner(form, threads=threads), TEXTS), expected)


@pytest.mark.parametrize(
    ("slots", "ids", "says"),
    [
        ([1], [[1] * 4], "positions below 8"),
        ([0], [[1, 97]], "ids must be below 97"),
        ([0], [[-1, 5]], "ids must be below 97"),
    ],
)
def test_impossible_reads_are_refused_and_change_nothing(slots, ids, says):
    session = runner("fp32").session(n_slots=2, capacity=8)
    session.read([1], [[1] * 5])
    with pytest.raises(UserError, match=says):
        session.read(slots, ids)
    assert session.lengths == [0, 5]
