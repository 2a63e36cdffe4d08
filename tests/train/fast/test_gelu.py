"""GELU by our kernels equals torch's."""

import pytest
import torch
import torch.nn.functional as F

from tests.train.fast.conftest import value_and_gradients
from tiedgpt import GPTConfig
from tiedgpt.core.layers import MLP
from tiedgpt.train.machine import cpu_threads
from tiedgpt.train.step.fast.gelu import VectorMLP, gelu

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1e-2, 1e-2)}


def torchs(z):
    return F.gelu(z, approximate="tanh")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [16, 48, 1 << 14, (1 << 16) + 16])
def test_value_and_gradient_are_torchs(dtype, size):
    z = torch.linspace(-12, 12, size).to(dtype)
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    relative, absolute = TOLERANCES[dtype]
    ours = value_and_gradients(gelu, grad, z)
    expected = value_and_gradients(torchs, grad.double(), z.double())
    for mine, exact in zip(ours, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, rtol=relative, atol=absolute)


def test_the_number_of_threads_changes_no_bit():
    z, grad = torch.randn(2, 1 << 17, generator=torch.Generator().manual_seed(1))
    results = []
    for threads in (1, 2, 3):
        with cpu_threads(threads):
            results.append(value_and_gradients(gelu, grad, z))
    for y, gradient in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_diverged_numbers_and_nan_have_torchs_value_and_gradient(dtype):
    sizes = torch.tensor([20.0, 1e3, 1e6, 1e12, 1e13, 1e18, 1e38, torch.inf])
    beside_nan = torch.zeros(16)
    beside_nan[5] = torch.nan
    z = torch.cat([sizes, -sizes, beside_nan]).to(dtype)
    ours, expected = (value_and_gradients(f, torch.ones_like(z), z) for f in (gelu, torchs))
    for mine, its in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-30, equal_nan=True)


def test_second_derivatives_are_torchs():
    z = torch.linspace(-3, 3, 32).requires_grad_()
    results = []
    for function in (gelu, torchs):
        (gradient,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
        results.append(torch.autograd.grad(gradient.sum(), z)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("change", [{"n_inner": 20}, {"activation_function": "relu"}, {}])
def test_an_mlp_of_any_width_and_activation_equals_the_plain_one(change):
    torch.manual_seed(0)
    shape = {"vocab_size": 9, "n_positions": 5, "n_embd": 8, "n_layer": 1, "n_head": 2}
    mlp = MLP(GPTConfig(**shape, **change))
    x, results = torch.randn(3, 5, 8), []
    for cls in (MLP, VectorMLP):
        mlp.__class__ = cls
        mlp.zero_grad()
        y = mlp(x)
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in mlp.parameters())])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its)
