"""Attention by blocks, which trains in bf16 on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from tiedgpt.core import attention
from tiedgpt.core.attention import blocked_attention, is_faster


def drawn(length: int, scale: float = 1.0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    q, k, v, dy = (torch.randn(2, 3, length, 16, generator=g) for _ in range(4))
    return [(t * s).bfloat16() for t, s in ((q, scale), (k, 1.0), (v, 1.0), (dy, 1.0))]


def run(attend, q, k, v, dy) -> list[torch.Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    y = attend(q, k, v)
    y.backward(dy)
    return [y.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("length", [1, 7, 64, 65, 129, 200])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_values_and_gradients_are_those_of_exact_attention(length, scale, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 64)
    tensors = drawn(length, scale)
    ours = run(blocked_attention, *tensors)
    exact = run(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(t.double() for t in tensors),
    )
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == theirs.shape
        assert (mine.double() - theirs).norm() <= 0.02 * theirs.norm() + 1e-2 * (length == 1)


def test_what_comes_after_changes_no_bit(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 64)
    q, k, v, _ = drawn(150)
    before = blocked_attention(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, :, 100:], v[:, :, 100:] = -3.0, 9.0
    assert torch.equal(blocked_attention(q, k, v)[:, :, :100], before[:, :, :100])


def test_it_is_used_in_training_in_bf16_alone():
    q = torch.randn(1, 2, 128, 16).bfloat16()
    assert is_faster(q.requires_grad_(), 0.0)
    assert not is_faster(q, 0.1)
    assert not is_faster(q.detach(), 0.0)
    assert not is_faster(q.float(), 0.0)
    assert not is_faster(q[:, :, :100], 0.0)
