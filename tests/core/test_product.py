"""Products in bf16 that keep little for backward, and give what plain ones give."""

import pytest
import torch
from torch import nn

from tiedgpt.core.layers import MLP
from tiedgpt.core.product import Product, recomputed


def plain(product: Product) -> nn.Linear:
    twin = nn.Linear(product.in_features, product.out_features, bias=product.bias is not None)
    twin.load_state_dict(product.state_dict())
    return twin


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_equals_linear_bit_for_bit(bias, dtype):
    torch.manual_seed(0)
    product = Product(24, 40, bias=bias)
    x, weights = torch.randn(3, 7, 24), torch.randn(3, 7, 40)
    results = []
    for module in (product, plain(product)):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            y = module(given)
        (y.float() * weights).sum().backward()
        results.append([y, given.grad, module.weight.grad])
        if bias:
            torch.testing.assert_close(
                module.bias.grad.float(), weights.sum((0, 1)), rtol=2e-2, atol=0.05
            )
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def kept_bytes(compute) -> int:
    """What autograd keeps for backward, parameters aside."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(kept.values())


def test_no_copy_of_the_weights_is_kept():
    product = Product(64, 64)
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_bytes(lambda: product(x)) == 2 * 64 * 2
        assert kept_bytes(lambda: plain(product)(x)) > 64 * 64 * 2


def test_the_mlp_keeps_its_activation_once_and_has_the_same_gradients(tiny_config):
    torch.manual_seed(1)
    mlp = MLP(tiny_config)
    x = torch.randn(2, 5, 32, requires_grad=True)
    expected = mlp.c_proj(mlp.activation(mlp.c_fc(x)))
    ours = mlp(x)
    assert torch.equal(ours, expected)
    parameters = [x, *mlp.parameters()]
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_what_is_computed_again_is_not_kept():
    z = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(3, 6, requires_grad=True)
    times = []

    def compute():
        times.append(1)
        return z.detach().exp()

    y = z.exp()
    with recomputed(y, compute):
        out = nn.functional.linear(y, weight)
    out.sum().backward()
    assert times == [1]
    torch.testing.assert_close(weight.grad, z.detach().exp().sum(0).expand(3, 6))
