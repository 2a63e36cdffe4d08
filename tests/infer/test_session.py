"""A session's slots against the model on whole sequences."""

import random

import numpy as np
import pytest
import torch

from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import NoRoomError
from tiedgpt.infer.torch_session import TorchRunner


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=97, n_positions=40, n_embd=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("windows", [None, (0, 5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_reads_cuts_and_copies_score_like_the_whole_sequence(windows, seed):
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=97, n_positions=40, n_embd=32, n_layer=2, n_head=4, attention_windows=windows
    )
    model = GPT(config).eval()
    session = TorchRunner(model).session(n_slots=4, capacity=40)
    held = [[] for _ in range(4)]
    dice = random.Random(seed)

    def some_ids(slot):
        most = min(dice.choice([1, 3, 20]), 40 - len(held[slot]))
        return [dice.randrange(97) for _ in range(dice.randint(1, most))]

    for _ in range(120):
        what = dice.random()
        if what < 0.2:
            slot = dice.randrange(4)
            del held[slot][dice.randint(0, len(held[slot])) :]
            session.truncate(slot, len(held[slot]))
        elif what < 0.3:
            source, target = dice.randrange(4), dice.randrange(4)
            session.copy(source, target)
            held[target] = list(held[source])
        else:
            slots = [s for s in dice.sample(range(4), dice.randint(1, 4)) if len(held[s]) < 40]
            ids = [some_ids(slot) for slot in slots]
            all_logits = [slot for slot in slots if dice.random() < 0.5]
            for slot, new, got in zip(
                slots, ids, session.read(slots, ids, all_logits=all_logits), strict=True
            ):
                held[slot] += new
                n = len(new) if slot in all_logits else 1
                with torch.no_grad():
                    h = model.body(torch.tensor([held[slot]]))[0, -n:]
                    logits = model.logits(h)
                np.testing.assert_allclose(got, logits.numpy(), atol=1e-5)
        assert session.lengths == [len(ids) for ids in held]


def test_requests_that_do_not_fit_are_refused_before_allocation(model):
    huge = GPTConfig(vocab_size=97, n_positions=1 << 20, n_embd=32, n_layer=2, n_head=4)
    model.config = huge
    with pytest.raises(NoRoomError, match="GB are free"):
        TorchRunner(model).session(n_slots=1 << 20, capacity=1 << 20)
