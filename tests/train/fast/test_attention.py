"""Attention of sequences and of packed documents by batched matmuls, in bf16 on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from tiedgpt import GPT, GPTConfig
from tiedgpt.train import fast_training
from tiedgpt.train.fast import attention
from tiedgpt.train.fast.attention import blocked_attention


def drawn(length: int, scale: float = 1.0, width: int = 16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    q, k, v, dy = (torch.randn(2, 3, length, width, generator=g) for _ in range(4))
    return [t.bfloat16() for t in (q * scale, k, v, dy)]


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(attend, q, k, v, dy) -> list[torch.Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    y = attend(q, k, v)
    y.backward(dy)
    return [y.detach(), q.grad, k.grad, v.grad]


def assert_nearly_as_accurate(ours, theirs, exact):
    for mine, its, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        apart, usual = (mine.double() - right).norm(), (its.double() - right).norm()
        assert apart <= 1.5 * usual + 1e-3 * right.norm() + 1e-5


@pytest.fixture
def calls(record_calls):
    """The calls of `blocked_attention`."""
    return record_calls(attention, "blocked_attention")


@pytest.mark.parametrize("length", [1, 7, 64, 65, 129, 300])
@pytest.mark.parametrize("scale", [1.0, 4.0, 9.0, 16.0])
@pytest.mark.parametrize("width", [16, 48, 64])
def test_blocks_are_nearly_as_accurate_as_torchs_kernel(length, scale, width):
    """Scores' standard deviation is `scale`; errors are relative to exact attention."""
    tensors = drawn(length, scale, width)
    exact = run(torchs, *(t.double() for t in tensors))
    ours, theirs = run(blocked_attention, *tensors), run(torchs, *tensors)
    assert_nearly_as_accurate(ours, theirs, exact)


def test_later_tokens_change_no_bit(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 64)
    q, k, v, _ = drawn(150)
    before = blocked_attention(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, :, 100:], v[:, :, 100:] = -3.0, 9.0
    assert torch.equal(blocked_attention(q, k, v)[:, :, :100], before[:, :, :100])


@pytest.mark.parametrize(
    ("change", "times"),
    [
        ({}, 2),
        ({"attn_pdrop": 0.1}, 0),
        ({"attention_windows": (0, 4)}, 1),
        ({"n_positions": 1030}, 0),
    ],
)
def test_blocks_are_used_in_bf16_without_dropout_in_dense_layers(change, times, calls):
    shape = {"vocab_size": 11, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = GPTConfig(**({**shape, "attn_pdrop": 0.0} | change))
    model, ids = GPT(config), torch.zeros(1, config.n_positions, dtype=torch.long)
    with fast_training(model):
        model.loss(ids, ids)
        assert not calls
        with torch.autocast("cpu", torch.bfloat16):
            model.loss(ids, ids)
    assert len(calls) == times


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

    exact = run(masked, *(t.double() for t in tensors))
    ours = run(lambda q, k, v: blocked_attention(q, k, v, mask), *tensors)
    assert_nearly_as_accurate(ours, run(masked, *tensors), exact)


@pytest.mark.parametrize("windows", [None, (0, 3)])
def test_changing_one_packed_document_changes_no_other_logits(windows, calls, monkeypatch):
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
