"""Logits and gradients of a GPU equal those of the CPU."""

import copy

import pytest
import torch

from tests.models import random_gpt

SHAPE = {"vocab_size": 331, "n_positions": 67, "n_embd": 96, "n_layer": 3, "n_head": 3}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Largest difference of logits as a share of the largest logit."""


@pytest.fixture(scope="module")
def model():
    return random_gpt(std=0.1, **SHAPE)


@pytest.fixture
def ids():
    return torch.randint(331, (2, 67), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_logits_equal_those_of_the_cpu(model, ids, gpu, dtype):
    with torch.no_grad():
        expected = model(ids)
        logits = copy.deepcopy(model).to(gpu, dtype)(ids.to(gpu))
    assert logits.device.type == gpu.type and logits.dtype == dtype
    difference = (logits.cpu().float() - expected).abs().amax(-1) / expected.abs().max()
    wrong = (~(difference < TOLERANCES[dtype])).nonzero().tolist()
    assert not wrong, f"logits differ first at (row, position) {wrong[0]}"


def test_gradients_equal_those_of_the_cpu(model, ids, gpu):
    there = copy.deepcopy(model).to(gpu)
    for one, device in ((model, "cpu"), (there, gpu)):
        one.zero_grad()
        x = ids.to(device)
        one.loss(x[:, :-1], x[:, 1:]).backward()
    for (name, a), b in zip(model.named_parameters(), there.parameters(), strict=True):
        assert torch.allclose(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-4 * a.grad.abs().max()), name
