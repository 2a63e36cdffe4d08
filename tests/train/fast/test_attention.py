"""Attention of sequences and of packed documents by batched matmuls, in bf16 on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from tests.train.fast.conftest import value_and_gradients
from tiedgpt import GPT, GPTConfig
from tiedgpt.train import fast_training
from tiedgpt.train.step.fast import attention
from tiedgpt.train.step.fast.attention import blocked_attention


def drawn(length: int, scale: float = 1.0, width: int = 16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    dy, q, k, v = (torch.randn(2, 3, length, width, generator=g) for _ in range(4))
    return [t.bfloat16() for t in (dy, q * scale, k, v)]


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def assert_nearly_as_accurate(ours, theirs, exact):
    for mine, its, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        apart, usual = (mine.double() - right).norm(), (its.double() - right).norm()
        assert apart <= 1.5 * usual + 1e-3 * right.norm() + 1e-5


@pytest.mark.parametrize("length", [1, 7, 64, 65, 129, 300])
@pytest.mark.parametrize("scale", [1.0, 4.0, 9.0, 16.0])
@pytest.mark.parametrize("width", [16, 48, 64])
def test_blocks_are_nearly_as_accurate_as_torchs_kernel(length, scale, width):
    """Scores' standard deviation is `scale`; errors are relative to exact attention."""
    tensors = drawn(length, scale, width)
    exact = value_and_gradients(torchs, *(t.double() for t in tensors))
    ours, theirs = (value_and_gradients(f, *tensors) for f in (blocked_attention, torchs))
    assert_nearly_as_accurate(ours, theirs, exact)


def test_later_tokens_change_no_bit(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 64)
    _, q, k, v = drawn(150)
    before = blocked_attention(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, :, 100:], v[:, :, 100:] = -3.0, 9.0
    assert torch.equal(blocked_attention(q, k, v)[:, :, :100], before[:, :, :100])


def packed_mask(lengths, n_sequences=2):
    """(B, 1, T, T) of documents of these lengths; in the second row they come the other way."""
    masks = []
    for row in range(n_sequences):
        ordered = lengths[::-1] if row % 2 else lengths
        masks.append(torch.block_diag(*(torch.ones(n, n).tril() for n in ordered)).bool())
    return torch.stack(masks)[:, None]


@pytest.mark.parametrize("lengths", [[1], [40, 24], [100, 3, 50, 1, 146], [300], [1] * 65])
@pytest.mark.parametrize("block", [16, 128])
def test_packed_documents_are_nearly_as_accurate_as_in_torchs_kernel(lengths, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    mask = packed_mask(lengths)
    tensors = drawn(sum(lengths), 4.0)

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    exact = value_and_gradients(masked, *(t.double() for t in tensors))
    ours = value_and_gradients(lambda q, k, v: blocked_attention(q, k, v, mask), *tensors)
    assert_nearly_as_accurate(ours, value_and_gradients(masked, *tensors), exact)


@pytest.mark.parametrize("windows", [None, (0, 3)])
def test_changing_one_packed_document_changes_no_other_logits(windows, record_calls, monkeypatch):
    calls = record_calls(attention, "blocked_attention")
    monkeypatch.setattr(attention, "BLOCK", 5)
    torch.manual_seed(1)
    model = GPT(
        GPTConfig(
            vocab_size=53, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0,
            embd_pdrop=0.0, resid_pdrop=0.0, attention_windows=windows,
        )
    )  # fmt: skip
    document_starts = torch.tensor([[0] * 5 + [5] * 4 + [9] * 7, [0] * 10 + [10] * 6])
    ids = torch.randint(53, document_starts.shape)
    changed = ids.clone()
    changed[0, 5:9] = (ids[0, 5:9] + 1) % 53
    with fast_training(model), torch.autocast("cpu", torch.bfloat16):
        before, after = (
            model.body(given, document_starts=document_starts) for given in (ids, changed)
        )
    assert len(calls) == 4
    expected = torch.zeros(2, 16, dtype=torch.bool)
    expected[0, 5:9] = True
    assert torch.equal((before != after).any(-1), expected)
