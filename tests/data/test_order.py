import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.data import IGNORED, Batches, in_order, order, permutation
from tiedgpt.data.order import LargePermutation
from tiedgpt.errors import UserError


class Stream:
    """Tokens 0, 1, 2, ...: each token is its own position."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.n
        return np.arange(start, stop).astype(np.uint16)


@st.composite
def shapes(draw):
    n_positions = draw(st.integers(1, 12))
    n_tokens = draw(st.integers(n_positions + 1, 150))
    return n_tokens, n_positions, draw(st.integers(1, 9)), draw(st.integers(-5, 2**70))


def batches_of(shape):
    n_tokens, n_positions, batch_size, seed = shape
    return Batches(Stream(n_tokens), batch_size=batch_size, n_positions=n_positions, seed=seed)


@given(shapes())
def test_each_token_but_the_first_is_a_target_once_per_epoch(shape):
    batches, n_tokens = batches_of(shape), shape[0]
    epochs = 3
    n_rows = epochs * batches.n_windows
    rows = [row for step in range(-(-n_rows // shape[2])) for row in batches.batch(step)[1]]
    for epoch in range(epochs):
        of_epoch = np.concatenate(rows[epoch * batches.n_windows :][: batches.n_windows])
        targets = of_epoch[of_epoch != IGNORED]
        assert sorted(targets.tolist()) == list(range(1, n_tokens))


@given(shapes(), st.integers(0, 40))
def test_a_target_is_the_token_after_its_input(shape, step):
    ids, targets = batches_of(shape).batch(step)
    assert ids.shape == targets.shape == (shape[2], shape[1])
    assert ids.dtype == targets.dtype == np.int64
    assert np.all((targets == ids + 1) | (targets == IGNORED))


@given(shapes(), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_a_batch_depends_only_on_seed_and_step(shape, steps):
    walked = batches_of(shape)
    for step in steps:
        for ours, fresh in zip(walked.batch(step), batches_of(shape).batch(step), strict=True):
            assert np.array_equal(ours, fresh)


def first_tokens(seed, step=0):
    batches = Batches(Stream(1001), batch_size=100, n_positions=10, seed=seed)
    return batches.batch(step)[0][:, 0].tolist()


def test_seeds_and_epochs_have_different_orders():
    orders = [first_tokens(seed, step) for seed in (0, 1, -1) for step in (0, 1)]
    assert all(sorted(order) == list(range(0, 1000, 10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "digest"),
    [
        (10_007, 1337, 3, "5643f011a2278efeff3ca511edb5041f2ec721869360babe3e9f9782819908b2"),
        (1_000, -1, 0, "af462c76231790b766ca25308edb93054f714e0d366c6ac61adf3f0f00f18cba"),
    ],
)
def test_a_permutation_is_frozen(n, seed, epoch, digest):
    order = permutation(n, seed=seed, epoch=epoch)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == digest


def test_batches_are_frozen_so_that_runs_resume_exactly():
    batches = Batches(Stream(10_000), batch_size=6, n_positions=33, seed=2**65 + 5)
    digest = hashlib.sha256()
    for step in (0, 1, 50, 51, 1000):
        for array in batches.batch(step):
            digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest() == (
        "f13c6ef03681de768e4d6da828cf9526f98eef77d61af8050c8d23194266f0ee"
    )


@given(st.integers(2, 3000), st.integers(0, 2**64), st.integers(0, 5))
def test_a_computed_order_visits_every_item_once(n, seed, epoch):
    order = LargePermutation(n, seed=seed, epoch=epoch)
    assert sorted(order[place] for place in range(n)) == list(range(n))


def test_a_computed_order_is_frozen_and_looks_random():
    n = 50_000_000_001
    order = LargePermutation(n, seed=7, epoch=1)
    assert [order[place] for place in range(3)] == [44419616722, 18275421058, 33751247365]
    drawn = np.array([order[place] for place in range(20_000)]) / n
    counts, _ = np.histogram(drawn, 50, (0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 90, "chi squared of 49 degrees, p = 0.0003"
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    others = (LargePermutation(n, seed=8, epoch=1), LargePermutation(n, seed=7, epoch=2))
    assert all(other[0] != order[0] for other in others)


def test_many_windows_are_ordered_without_a_table(monkeypatch):
    tracemalloc.start()
    batches = Batches(Stream(2**39), batch_size=4, n_positions=8, seed=0)  # a terabyte
    ids, _ = batches.batch(10**9)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert ids.shape == (4, 8)
    monkeypatch.setattr(order, "LARGEST_TABLE", 10)
    small = batches_of((1001, 10, 10, 5))
    first = [int(row[0]) // 10 for step in range(10) for row in small.batch(step)[0]]
    assert sorted(first) == list(range(100))


def test_a_ragged_end_is_aligned_its_overlap_ignored_and_a_short_text_is_one_window():
    ((ids, targets),) = in_order(Stream(8), batch_size=9, n_positions=3)
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5], [4, 5, 6]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6], [IGNORED, IGNORED, 7]]
    ((ids, targets),) = in_order(Stream(3), batch_size=2, n_positions=100)
    assert (ids.tolist(), targets.tolist()) == ([[0, 1]], [[1, 2]])


@given(shapes())
def test_evaluation_sees_every_target_once_in_order(shape):
    n_tokens, n_positions, batch_size, _ = shape
    found = list(in_order(Stream(n_tokens), batch_size=batch_size, n_positions=n_positions))
    targets = np.concatenate([targets.ravel() for _, targets in found])
    assert targets[targets != IGNORED].tolist() == list(range(1, n_tokens))
    assert all(ids.shape == (batch_size, n_positions) for ids, _ in found[:-1])
    assert 1 <= len(found[-1][0]) <= batch_size


def test_a_sample_of_windows_is_evenly_spread_and_deterministic():
    found = in_order(Stream(1001), batch_size=3, n_positions=10, at_most=4)
    assert [ids[:, 0].tolist() for ids, _ in found] == [[0, 250, 500], [750]]
    whole = in_order(Stream(41), batch_size=4, n_positions=10, at_most=9)
    assert [ids[:, 0].tolist() for ids, _ in whole] == [[0, 10, 20, 30]]


def test_text_shorter_than_the_context_is_refused_with_both_numbers_and_the_remedy():
    with pytest.raises(UserError, match=r"1,024 tokens.* 1,024 needs 1,025: use a shorter --cont"):
        Batches(Stream(1024), batch_size=1, n_positions=1024, seed=0)
    with pytest.raises(UserError, match="1 token has nothing to predict"):
        list(in_order(Stream(1), batch_size=1, n_positions=4))


@pytest.mark.parametrize("name", ["batch_size", "n_positions"])
def test_sizes_are_positive(name):
    sizes = {"batch_size": 1, "n_positions": 1, name: 0}
    with pytest.raises(UserError, match=f"{name}=0.* must be at least 1"):
        Batches(Stream(10), seed=0, **sizes)
    with pytest.raises(UserError, match=f"{name}=0.* must be at least 1"):
        next(in_order(Stream(10), **sizes))
