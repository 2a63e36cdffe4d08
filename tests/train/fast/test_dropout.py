"""Dropout by a hash drops elements independently, and its gradient drops the same ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiedgpt import GPT, GPTConfig
from tiedgpt.train import fast_training
from tiedgpt.train.machine import cpu_threads
from tiedgpt.train.step.fast import dropout as module
from tiedgpt.train.step.fast.dropout import HashedDropout, dropout

N = 1 << 20


def dropped(p: float, seed: int, n: int = N) -> torch.Tensor:
    """Return which elements a call drops."""
    torch.manual_seed(seed)
    return dropout(torch.ones(n, requires_grad=True), p) == 0


def assert_share(elements: torch.Tensor, share: float) -> None:
    """Assert that about a share of N elements is true."""
    assert abs(int(elements.sum()) - share * N) < 5 * (share * (1 - share) * N) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_a_share_of_p_is_dropped_and_the_rest_is_scaled_in_value_and_gradient(p, dtype):
    torch.manual_seed(0)
    x = torch.linspace(0.5, 1.5, N).to(dtype).requires_grad_()
    y = dropout(x, p)
    y.backward(torch.full_like(x, 3.0))
    is_dropped = y == 0
    assert_share(is_dropped, p)
    for result, before in ((y, x), (x.grad, torch.full_like(x, 3.0))):
        assert result.dtype == dtype and not result[is_dropped].any()
        scaled = (before.float() / (1 - p))[~is_dropped]
        torch.testing.assert_close(result.float()[~is_dropped], scaled, rtol=8e-3, atol=0)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_elements_at_any_distance_are_dropped_independently(p, seed):
    deviations = dropped(p, seed, 4 * N).float() - p
    spectrum = torch.fft.rfft(deviations).abs().square()
    correlations = torch.fft.irfft(spectrum)[1 : 2 * N] / (p * (1 - p) * 4 * N)
    assert correlations.abs().max() < 6.5 * (4 * N) ** -0.5


def test_calls_and_seeds_drop_independently_and_one_seed_drops_the_same():
    torch.manual_seed(2)
    x = torch.ones(N, requires_grad=True)
    first, second = (dropout(x, 0.3) == 0 for _ in range(2))
    for other in (second, *(dropped(0.3, seed) for seed in range(3, 9))):
        assert_share(first & other, 0.09)
    assert torch.equal(dropped(0.3, 2), first)


def test_the_number_of_threads_changes_no_bit():
    results = []
    for threads in (1, 2, 3):
        with cpu_threads(threads):
            results.append(dropped(0.5, 0, 1 << 17))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_or_become_nan(number):
    x = torch.full((1 << 10,), number, requires_grad=True)
    y = dropout(x, 0.5)
    y.backward(torch.full_like(x, number))
    assert not y.isfinite().any() and not x.grad.isfinite().any()


def test_second_and_vectorized_derivatives_are_those_of_a_product_with_the_mask():
    torch.manual_seed(0)
    x, grads = torch.randn(64, requires_grad=True), torch.randn(3, 64)
    torch.manual_seed(1)
    mask = dropout(torch.ones(64, requires_grad=True), 0.4).detach()
    torch.manual_seed(1)
    y = dropout(x, 0.4)
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, grads * mask)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 2 * mask.square())


@pytest.mark.parametrize(
    ("change", "shape", "dtype", "is_used"),
    [
        ({}, (2, 16), torch.float32, True),
        ({}, (2, 16), torch.bfloat16, True),
        ({}, (2, 16), torch.float64, False),
        ({}, (3, 5), torch.float32, False),
        ({"p": 0.0}, (2, 16), torch.float32, False),
        ({"p": 1.0}, (2, 16), torch.float32, False),
        ({"training": False}, (2, 16), torch.float32, False),
        ({"inplace": True}, (2, 16), torch.float32, False),
    ],
)
def test_other_cases_are_torchs(change, shape, dtype, is_used, record_calls):
    calls, results = record_calls(module, "dropout"), []
    for layer in (nn.Dropout(0.5), HashedDropout(0.5)):
        vars(layer).update(change)
        torch.manual_seed(0)
        x = torch.ones(shape, dtype=dtype, requires_grad=True)
        results.append(layer(x * 1))
        assert set(results[-1].flatten().tolist()) <= {0.0, 1.0, 2.0}
    assert len(calls) == is_used
    assert is_used or torch.equal(*results)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_recomputed_blocks_drop_the_same(dtype, record_calls):
    calls, results = record_calls(module, "dropout"), []
    shape = {"vocab_size": 11, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 1}
    model = GPT(GPTConfig(**shape, embd_pdrop=0.2, attn_pdrop=0.0, resid_pdrop=0.2)).train()
    ids = torch.randint(11, (3, 32))
    for recomputes in (False, True):
        for block in model.h if recomputes else ():
            run = block.forward
            block.forward = lambda *inputs, run=run: checkpoint(run, *inputs, use_reentrant=False)
        torch.manual_seed(4)
        with fast_training(model), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = model.loss(ids, ids)
            results.append(torch.autograd.grad(loss, list(model.parameters())))
    assert len(calls) > 5 + 5
    for mine, its in zip(*results, strict=True):
        assert torch.equal(mine, its)


def test_reentrant_checkpoints_drop_the_same_without_and_with_a_graph():
    shape = {"vocab_size": 11, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 1}
    model = GPT(GPTConfig(**shape, embd_pdrop=0.2, attn_pdrop=0.0, resid_pdrop=0.2)).train()
    ids, results = torch.randint(11, (3, 32)), []
    for recomputes in (False, True):
        for block in model.h if recomputes else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=True)
        torch.manual_seed(4)
        with fast_training(model):
            model.loss(ids, ids).backward()
        results.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
