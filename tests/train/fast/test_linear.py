"""Linear layers in bf16 that keep little for the backward pass, and give what plain ones give."""

import pytest
import torch
from torch import nn

from tests.models import kept_for_backward
from tiedgpt.train.step.fast.linear import LeanLinear


def plain(lean: LeanLinear) -> nn.Linear:
    twin = nn.Linear(lean.in_features, lean.out_features, bias=lean.bias is not None)
    twin.load_state_dict(lean.state_dict())
    return twin


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_equals_linear_bit_for_bit(bias, dtype):
    torch.manual_seed(0)
    lean = LeanLinear(24, 40, bias=bias)
    x, weights = torch.randn(3, 7, 24), torch.randn(3, 7, 40)
    results = []
    for module in (lean, plain(lean)):
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


def test_no_copy_of_the_weights_is_kept():
    lean = LeanLinear(64, 64)
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_for_backward(lean, lambda: lean(x)) == 2 * 64 * 2
        assert kept_for_backward(lean, lambda: plain(lean)(x)) > 64 * 64 * 2
