"""Examples in rows: every one once an epoch, and each as if alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.data import packing
from tiedgpt.data.examples import EncodedExamples, Example
from tiedgpt.data.order import IGNORED
from tiedgpt.data.packing import PackedBatches, best_fit
from tiedgpt.errors import UserError


def drawn(lengths, seed=0):
    """Examples of random ids below 97; about half are targets, and always the last."""
    draw = np.random.Generator(np.random.Philox(seed))
    examples = []
    for n in lengths:
        counted = (draw.random(n) < 0.5).tolist()
        examples.append(Example("", draw.integers(97, size=n).tolist(), [*counted[:-1], True]))
    return EncodedExamples.gather(examples)


LENGTHS = [5, 2, 11, 24, 7, 3, 3, 9, 13, 2, 17, 6]


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 7))
def test_every_item_is_in_one_row_and_rows_fit(lengths, buffer):
    before, packing.BUFFER = packing.BUFFER, buffer
    try:
        rows = best_fit(lengths, 30)
    finally:
        packing.BUFFER = before
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 30 for row in rows)
    firsts = [row[0] for row in rows]
    assert firsts == sorted(firsts), "a row begins with the first item that is left"


def test_the_longest_fitting_item_comes_next_and_ties_keep_their_order():
    assert best_fit([4, 3, 6, 2, 6, 1, 4], 10) == [[0, 2], [1, 4, 5], [3, 6]]


def test_rows_are_nearly_full():
    lengths = np.random.Generator(np.random.Philox(1)).integers(10, 200, size=3000)
    rows = best_fit(lengths.tolist(), 512)
    assert lengths.sum() / (512 * len(rows)) > 0.98


def test_rows_hold_ids_targets_and_document_starts_of_the_examples():
    examples = drawn(LENGTHS)
    batches = PackedBatches(examples, batch_size=3, n_positions=24, seed=5)
    ids, targets, document_starts = batches.rows(0, batches.n_rows())
    assert {array.dtype for array in (ids, targets, document_starts)} == {np.dtype(np.int64)}
    assert {array.shape for array in (ids, targets, document_starts)} == {(batches.n_rows(), 24)}
    found = []
    for row in range(len(ids)):
        for start in sorted(set(document_starts[row].tolist())):
            here = document_starts[row] == start
            assert np.flatnonzero(here)[0] == start, (
                "an example begins where `document_starts` says"
            )
            found.append((ids[row][here].tolist(), targets[row][here].tolist()))
    expected = []
    for number in range(len(examples)):
        its, counted = examples.example(number)
        follows = [
            id if is_counted else IGNORED
            for id, is_counted in zip(its[1:].tolist(), counted[1:], strict=True)
        ]
        expected.append((its.tolist(), [*follows, IGNORED]))
    rest = [part for part in found if part not in expected]
    assert sorted(part for part in found if part in expected) == sorted(expected)
    assert all(set(targets) == {IGNORED} for _, targets in rest), "padding is not counted"


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    examples = drawn(LENGTHS * 5)
    made = [PackedBatches(examples, batch_size=4, n_positions=24, seed=seed) for seed in (3, 3, 4)]
    steps = [made[0].batch(step) for step in range(30)]
    later = [made[1].batch(step) for step in reversed(range(30))][::-1]
    for one, other in zip(steps, later, strict=True):
        assert all(map(np.array_equal, one, other))
    assert not np.array_equal(steps[0][0], made[2].batch(0)[0])
    epoch = made[0].n_rows(0)
    rows = [made[0].rows(start, epoch)[0] for start in (0, epoch)]
    assert not np.array_equal(*rows)
    whole = [np.sort(r.ravel()) for r in (rows[0], made[0].rows(epoch, made[0].n_rows(1))[0])]
    assert np.array_equal(*(ids[ids > 0] for ids in whole)), "each epoch has every example"


def test_without_packing_a_row_has_one_example():
    examples = drawn(LENGTHS)
    batches = PackedBatches(examples, batch_size=3, n_positions=24, seed=5, packing=False)
    _, _, document_starts = batches.rows(0, batches.n_rows())
    assert len(document_starts) == len(LENGTHS)
    lengths = [int(row[-1]) or 24 for row in document_starts]  # where the padding begins
    assert sorted(lengths) == sorted(LENGTHS)
    assert all((row[:n] == 0).all() for row, n in zip(document_starts, lengths, strict=True))


def test_examples_that_cannot_be_packed_are_refused():
    with pytest.raises(UserError, match=r"up to 24 tokens cannot be packed into 2 rows of 23"):
        PackedBatches(drawn(LENGTHS), batch_size=2, n_positions=23, seed=0)
    with pytest.raises(UserError, match="0 examples"):
        PackedBatches(drawn([]), batch_size=2, n_positions=24, seed=0)
