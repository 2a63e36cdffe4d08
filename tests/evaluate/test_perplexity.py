"""The sums of a training's validation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.models import random_gpt
from tiedgpt.evaluate.perplexity import measure_text, running_totals


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_totals_are_sums_over_the_counted_targets_of_all_batches_so_far(autocast):
    model, lengths = random_gpt(vocab_size=11, n_positions=13, n_embd=8, n_head=2), np.arange(11)
    draws = np.random.default_rng(0)
    batches = [(draws.integers(0, 11, (2, 5)), draws.integers(1, 11, (2, 5))) for _ in range(3)]
    batches[1][1][0, 2:] = -100
    batches[2] += (np.array([[0, 0, 2, 2, 2]] * 2),)  # two documents in a row
    model.train()

    def measure(batch):
        assert not model.training and not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") is (autocast is not None)
        return measure_text(model, batch, lengths)

    found = list(running_totals(model, batches, measure, autocast=autocast))
    assert model.training
    expected = np.zeros(3)
    for (ids, targets, *packed), totals in zip(batches, found, strict=True):
        parts = torch.from_numpy(ids).split([2, 3] if packed else [5], 1)
        with torch.no_grad():
            logits = torch.cat([model.eval()(part) for part in parts], 1).flatten(0, 1)
        answers = torch.from_numpy(targets).flatten()
        counted = targets[targets != -100]
        nats = float(F.cross_entropy(logits, answers, reduction="sum"))
        expected += nats, len(counted), counted.sum()
        assert totals == pytest.approx(expected, rel=1e-5 if autocast is None else 1e-2)
