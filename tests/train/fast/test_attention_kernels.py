"""Attention of short sequences by our kernels equals torch's, in fp32 and in bf16."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.train.fast.conftest import run_as_thread, value_and_gradients
from tiedgpt import GPT, GPTConfig
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.train import fast_training
from tiedgpt.train.step.fast import attention as module
from tiedgpt.train.step.fast import gelu as gelu_module
from tiedgpt.train.step.fast.attention import attention
from tiedgpt.train.step.fast.gelu import gelu

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def torchs(qkv, n_head):
    q, k, v = qkv.unflatten(-1, (3, n_head, -1)).transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def drawn(length, n_head=2, size=32, scale=1.0):
    g = torch.Generator().manual_seed(length)
    qkv = scale * torch.randn(3, length, 3 * n_head * size, generator=g)
    return qkv, torch.randn(3, length, n_head * size, generator=g)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("length", "n_head", "size"), [(32, 1, 32), (96, 3, 32), (256, 2, 64), (512, 1, 32)]
)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_value_and_gradient_are_torchs(dtype, length, n_head, size, scale):
    qkv, grad = (t.to(dtype) for t in drawn(length, n_head, size, scale))
    ours = value_and_gradients(lambda x: attention(x, n_head), grad, qkv)
    exact = value_and_gradients(lambda x: torchs(x, n_head), grad.double(), qkv.double())
    for mine, right in zip(ours, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == right.shape
        assert (mine.double() - right).norm() <= TOLERANCES[dtype] * right.norm()


@pytest.mark.parametrize(
    ("its_module", "compute"), [(module, lambda x: attention(x, 2)), (gelu_module, gelu)]
)
def test_a_gradients_kernel_is_prepared_while_that_of_the_value_runs(
    monkeypatch, its_module, compute
):
    qkv, grad = drawn(32)
    value_and_gradients(compute, grad if its_module is module else qkv, qkv)  # it is compiled now
    unused = Kernel(its_module.GRADIENT.module, its_module.GRADIENT.name)
    monkeypatch.setattr(its_module, "GRADIENT", unused)
    compute(qkv)
    assert unused.functions


def test_later_tokens_change_no_bit():
    qkv, _ = drawn(128)
    changed = qkv.clone()
    changed[:, 77:] = 5.0
    assert torch.equal(attention(changed, 2)[:, :77], attention(qkv, 2)[:, :77])


def test_the_number_of_a_thread_changes_no_bit():
    qkv, grad = (t.numpy().ravel() for t in drawn(64))
    shape, results = (3, 64, 2, 32), []
    for thread in range(3):
        sums, y, out = np.zeros(3 * 2 * 64 * 2, np.float32), 0 * grad, 0 * qkv
        run_as_thread(thread, module.FORWARD, 64 * (8 + 4 * 32), *shape, qkv, sums, ..., y)
        n_scratch = 64 * (2 * 64 + 6 * 32)
        run_as_thread(thread, module.GRADIENT, n_scratch, *shape, qkv, sums, grad, ..., out)
        results.append([*y, *out])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("matrix", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_value_and_gradient(matrix, number):
    qkv, grad = drawn(32, n_head=1)
    qkv[0, 5, 32 * matrix] = number
    for result in value_and_gradients(lambda x: attention(x, 1), grad, qkv):
        assert not result[0].isfinite().all()
        assert result[1:].isfinite().all()


def test_second_and_vectorized_derivatives_are_torchs():
    (qkv, grad), results = drawn(64), []
    for attend in (attention, torchs):
        x = qkv.clone().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(attend(x, 2), x, grad, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            both = torch.stack([grad, -2 * grad])
            (batched,) = torch.autograd.grad(attend(x, 2), x, both, is_grads_batched=True)
        results.append((first.detach(), second, batched))
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


def a_gpt(**change):
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPTConfig(**(shape | dropout | change))
    return GPT(config).train(), torch.randint(11, (3, config.n_positions))


@pytest.mark.parametrize(
    ("change", "by_kernels", "by_blocks"),
    [
        ({}, 2, 0),
        ({"attn_pdrop": 0.1}, 0, 0),
        ({"attention_windows": (0, 4)}, 1, 0),
        ({"attention_windows": (0, 4), "n_positions": 48}, 0, 1),
        ({"n_positions": 48}, 0, 2),
        ({"n_positions": 544}, 0, 2),
        ({"n_positions": 1030}, 0, 0),
        ({"n_head": 4}, 0, 2),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gpt_has_the_plain_loss_and_gradients(change, by_kernels, by_blocks, dtype, record_calls):
    names = "attention", "blocked_attention"
    calls = [record_calls(module, name) for name in names]
    model, ids = a_gpt(**change)

    def loss_and_gradients():
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = model.loss(ids, ids)
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    expected = loss_and_gradients()
    with fast_training(model):
        fast = loss_and_gradients()
    assert [len(inputs) for inputs in calls] == [by_kernels, 0 if dtype is None else by_blocks]
    for mine, its in zip(fast, expected, strict=True):
        tolerance = 1e-4 if dtype is None else 0.1
        assert (mine - its).norm() <= tolerance * its.norm() + 1e-4


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 48], ids=["kernels", "batched matmuls"])
def test_the_default_dtype_of_torch_changes_no_gradient(default, length):
    model, ids = a_gpt()
    weight = model.h[0].attn.c_attn.weight

    def gradient():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(model.loss(ids[:, :length], ids[:, :length]), weight)[0]

    with fast_training(model):
        expected = gradient()
        torch.set_default_dtype(default)
        try:
            assert torch.equal(gradient(), expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_second_derivatives_pass_through_outputs_of_c_attn_with_other_strides():
    model, ids = a_gpt()
    results = []
    for forward in (lambda module, x, y: None, lambda module, x, y: y.mT.contiguous().mT):
        hook = model.h[0].attn.c_attn.register_forward_hook(forward)
        weight = model.h[0].attn.c_attn.weight
        with fast_training(model):
            loss = model(ids).square().mean()
            (first,) = torch.autograd.grad(loss, weight, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), weight)[0])
        hook.remove()
    torch.testing.assert_close(*results)
