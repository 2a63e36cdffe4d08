"""The two gradients of W, and the machine's use."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.train.conftest import CPU, PLAN, assert_resumes
from tiedgpt import GPT, GPTConfig
from tiedgpt.heads import MultipleChoice, SequenceClassifier
from tiedgpt.train.machine import (
    GradientNorms,
    describe,
    model_flops,
    peak_flops,
    peak_memory,
)
from tiedgpt.train.step import train_step
from tiedgpt.train.storage import RunDirectory


@pytest.fixture
def batch():
    drawn = np.random.default_rng(1).integers(0, 97, (2, 5, 24))
    drawn[1, 0, :20] = -100
    drawn[0, :, :4] = 7  # rows that are read often
    return drawn[0], drawn[1]


def two_gradients(model: GPT, ids, targets) -> tuple[float, float]:
    """Return the norms with W taken apart into two matrices, one for each use."""
    reads = model.wte.weight.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    forward = model.wte.forward
    model.wte.forward = lambda ids, *_: F.embedding(ids, reads)
    try:
        model.loss(torch.from_numpy(ids), torch.from_numpy(targets)).backward()
    finally:
        model.wte.forward = forward
    predicts = model.wte.weight.grad if model.head is None else model.head.weight.grad
    return float(reads.grad.norm()), float(predicts.norm())


@pytest.mark.parametrize("micro_batch", [5, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_the_two_norms_equal_those_of_the_separated_gradients(
    tiny_config, batch, micro_batch, tied
):
    torch.manual_seed(2)
    model = GPT(dataclasses.replace(tiny_config, tie_word_embeddings=tied)).eval()
    expected = two_gradients(model, *batch)
    gradients = GradientNorms(model)
    clipped = dataclasses.replace(PLAN, micro_batch=micro_batch, grad_clip=1e-3)
    with gradients.watching():
        train_step(model, [], batch, clipped)
    found = gradients.metrics()
    assert list(found) == ["grad_norm_w_input", "grad_norm_w_output"]
    assert list(found.values()) == pytest.approx(expected, rel=1e-4)


def test_measuring_changes_no_bit_of_a_step(tiny, batch):
    gradients = GradientNorms(tiny)
    seen = []
    for watched in (False, True):
        if watched:
            with gradients.watching():
                result = train_step(tiny, [], batch, PLAN)
        else:
            result = train_step(tiny, [], batch, PLAN)
        seen.append([result, [parameter.grad.clone() for parameter in tiny.parameters()]])
    assert seen[0][0] == seen[1][0]
    assert all(map(torch.equal, seen[0][1], seen[1][1]))
    assert not tiny.wte._forward_hooks, "nothing is left behind"


def test_a_head_that_predicts_no_tokens_has_one_gradient_of_w_and_a_frozen_w_none(tiny):
    head = SequenceClassifier(tiny, labels=["a", "b"])
    ids, lengths = np.ones((2, 8), np.int64), np.array([8, 5])
    gradients, unclipped = GradientNorms(head), dataclasses.replace(PLAN, grad_clip=1e9)
    with gradients.watching():
        train_step(head, [], (ids, lengths, np.array([0, 1])), unclipped)
    whole = pytest.approx(float(tiny.wte.weight.grad.norm()), rel=1e-5)
    assert gradients.metrics() == {"grad_norm_w_input": whole}
    tiny.wte.weight.requires_grad_(False)
    with gradients.watching():
        train_step(head, [], (ids, lengths, np.array([0, 1])), unclipped)
    assert gradients.metrics() == {}


def test_flops_follow_the_convention():
    config = GPTConfig.preset("gpt2", n_layer=2, vocab_size=500, n_positions=64)
    model = GPT(config)
    n = config.parameter_count() - 64 * 768
    assert model_flops(model, 64) == 6 * n + 12 * 2 * 768 * 64
    untied = GPT(dataclasses.replace(config, tie_word_embeddings=False))
    assert model_flops(untied, 64) == model_flops(model, 64), "one product predicts either way"
    assert model_flops(MultipleChoice(model), 64) > model_flops(model, 64)
    head = SequenceClassifier(model, labels=["a", "b"])
    assert model_flops(head, 64) == model_flops(model, 64) - 6 * 498 * 768


def test_the_machine_has_a_name_peak_flops_and_memory():
    assert 1e8 < peak_flops(CPU, "fp32") < 1e15
    assert 1e7 < peak_memory(CPU) < 1e13
    assert describe()["processor"] and describe()["cores"] >= 1


def test_a_resumed_run_measures_what_an_uninterrupted_one_does(trial):
    whole, _ = assert_resumes(lambda name: trial(name, steps=21), 13)
    for path in (whole.run.path, whole.run.path.with_name("parts")):
        lines = RunDirectory(path).read_metrics()
        measured = [line for line in lines if "grad_norm_w_output" in line]
        assert [line["step"] for line in measured] == [1, 10, 20]
        assert all("machine_flops_use" in line for line in measured)
