"""Reads, cuts and copies in a session's slots against whole sequences: to the bit on kernels."""

import random

import numpy as np
import pytest
import torch

from tests.infer.kernels.conftest import made
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.infer.torch_session import TorchRunner
from tiedgpt.weights.formats.packed.panels import PRECISIONS
from tiedgpt.weights.formats.packed.writer import pack_gpt


@pytest.mark.parametrize("windows", [None, (0, 5)])
@pytest.mark.parametrize("backend", ["torch", *PRECISIONS])
def test_any_reads_cuts_and_copies_score_like_the_whole_sequence(backend, windows):
    model, capacity, dice = made(attention_windows=windows), 24, random.Random(0)
    runner = TorchRunner(model)
    if backend != "torch":
        runner = PackedRunner(pack_gpt(model, backend), threads=2)
    session, fresh = (runner.session(n_slots=n, capacity=capacity) for n in (3, 1))
    ids_in_slot = [[] for _ in range(3)]

    def some_ids(slot):
        most = min(dice.choice([1, 3, 20]), capacity - len(ids_in_slot[slot]))
        return [dice.randrange(97) for _ in range(dice.randint(1, most))]

    for _ in range(100):
        action, slot, other = dice.random(), dice.randrange(3), dice.randrange(3)
        n_slots = dice.randint(1, 3)
        if action < 0.25:
            del ids_in_slot[slot][dice.randint(0, len(ids_in_slot[slot])) :]
            session.truncate(slot, len(ids_in_slot[slot]))
        elif action < 0.35:
            session.copy(slot, other)
            ids_in_slot[other] = list(ids_in_slot[slot])
        elif slots := [s for s in dice.sample(range(3), n_slots) if len(ids_in_slot[s]) < capacity]:
            ids = [some_ids(slot) for slot in slots]
            all_logits = [slot for slot in slots if dice.random() < 0.5]
            read = session.read(slots, ids, all_logits=all_logits)
            for slot, new, got in zip(slots, ids, read, strict=True):
                ids_in_slot[slot] += new
                if backend == "torch":
                    with torch.no_grad():
                        expected = model(torch.tensor([ids_in_slot[slot]]))[0].numpy()
                    apart = 1e-5 * np.abs(expected).max()
                else:
                    fresh.truncate(0, 0)
                    ((expected,), apart) = fresh.read([0], [ids_in_slot[slot]], all_logits=[0]), 0
                n = len(new) if slot in all_logits else 1
                np.testing.assert_allclose(got, expected[-n:], atol=apart, rtol=0)
        assert session.lengths == [len(ids) for ids in ids_in_slot]


@pytest.mark.parametrize("form", PRECISIONS)
def test_any_number_of_threads_gives_the_same_bits(form):
    packed, dice = pack_gpt(made(attention_windows=(0, 7)), form), random.Random(0)
    texts = [[dice.randrange(97) for _ in range(n)] for n in (24, 1, 5, 10)]

    def read(threads):
        session = PackedRunner(packed, threads=threads).session(n_slots=4, capacity=24)
        return np.concatenate(session.read(range(4), texts, all_logits=range(4)))

    expected = read(1)
    for threads in (2, 3, 4):
        np.testing.assert_array_equal(read(threads), expected)


@pytest.mark.parametrize(
    ("slots", "ids", "says"),
    [
        ([1], [[1] * 4], "positions below 8"),
        ([0], [[1, 97]], "ids must be below 97"),
        ([0], [[-1, 5]], "ids must be below 97"),
    ],
)
def test_impossible_reads_are_refused_and_change_nothing(slots, ids, says):
    session = PackedRunner(pack_gpt(made(), "fp32"), threads=2).session(n_slots=2, capacity=8)
    session.read([1], [[1] * 5])
    with pytest.raises(UserError, match=says):
        session.read(slots, ids)
    assert session.lengths == [0, 5]


@pytest.mark.parametrize("backend", ["torch", "int8"])
def test_impossible_memory_is_refused_before_allocation(backend):
    model = made()
    runner = TorchRunner(model) if backend == "torch" else PackedRunner(pack_gpt(model, backend))
    with pytest.raises(NoRoomError, match="GB are free"):
        runner.session(n_slots=1 << 40, capacity=24)
