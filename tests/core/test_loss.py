import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tiedgpt import GPT
from tiedgpt.core import loss as loss_module
from tiedgpt.core.loss import chunked_cross_entropy


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of at most 7 rows, so that even tiny inputs take several and leave a ragged one."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 7 * 4 * 97)


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors)


@st.composite
def loss_inputs(draw):
    """States (N, 5), W (V, 5) and targets (N,), some of them -100."""
    n, vocab = draw(st.integers(1, 30)), draw(st.integers(2, 90))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    h = draw(st.sampled_from([0.1, 1.0, 30.0])) * torch.randn(n, 5, generator=g).double()
    w = torch.randn(vocab, 5, generator=g).double()
    targets = torch.randint(vocab, (n,), generator=g)
    targets[torch.rand(n, generator=g) < draw(st.floats(0, 0.9))] = -100
    targets[0] = 0
    return h.requires_grad_(), w.requires_grad_(), targets


def assert_equals_cross_entropy(loss, h, w, targets):
    """`loss(h, w, targets)` in fp32 must be the cross-entropy of all logits, with its gradients.

    A probability is as inexact as its logit, which fp32 rounds by 6e-8 of its size.
    """
    logits = h @ w.T
    ours, plain = loss(h.float(), w.float(), targets), F.cross_entropy(logits, targets)
    atol = max(1e-5, 2e-8 * (logits.abs().max() * h.abs().max()).detach().item())
    torch.testing.assert_close(ours.double(), plain, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(gradients(ours, (h, w)), gradients(plain, (h, w)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(loss_inputs())
def test_equals_cross_entropy_of_the_full_logits(inputs):
    def loss(h, w, targets):
        return chunked_cross_entropy(h, targets, lambda rows: rows @ w.T, n_rows=7)

    assert_equals_cross_entropy(loss, *inputs)


def test_the_shared_matrix_gets_the_gradients_of_both_its_uses(tiny, ids):
    targets = ids.roll(-1, 1)
    h = tiny.body(ids).detach().flatten(0, 1)
    predicting = torch.autograd.grad(
        F.cross_entropy(tiny.wte.unembed(h), targets.flatten()), tiny.wte.weight
    )[0]
    frozen = tiny.wte.weight.detach().clone()
    reading = torch.autograd.grad(
        F.cross_entropy(F.linear(tiny.body(ids), frozen).flatten(0, 1), targets.flatten()),
        tiny.wte.weight,
    )[0]
    both = torch.autograd.grad(tiny.loss(ids, targets), tiny.wte.weight)[0]
    torch.testing.assert_close(both, predicting + reading, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_its_own_has_the_same_loss_and_no_full_logits(tiny, ids, bias):
    tiny.head = nn.Linear(32, 97, bias=bias)
    targets = ids.roll(-1, 1)
    targets[0, :9] = -100
    sizes = []
    tiny.head.register_forward_hook(lambda _, __, out: sizes.append(out.shape[0]))
    parameters = [p for p in tiny.parameters()]
    ours = gradients(tiny.loss(ids, targets), parameters)
    assert max(sizes, default=0) <= 7
    plain = gradients(F.cross_entropy(tiny(ids).flatten(0, 1), targets.flatten()), parameters)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_every_chunk_but_the_first_is_recomputed_in_the_backward_pass(tiny, ids):
    rows = []
    tiny.logits = lambda h: rows.append(len(h)) or GPT.logits(tiny, h)
    loss = tiny.loss(ids, ids)
    assert len(rows) == 11 and sum(rows) == ids.numel() == 72
    loss.backward()
    assert len(rows) == 21 and sum(rows) == 72 + 72 - rows[0]


def test_dropout_in_a_head_is_the_same_when_recomputed(tiny, ids):
    dropout, kept = nn.Dropout(0.5), []
    tiny.head = nn.Sequential(dropout, nn.Linear(32, 97)).train()
    dropout.register_forward_hook(lambda _, given, out: kept.append((out != 0).tolist()))
    loss = tiny.loss(ids, ids)
    first, *rest = list(kept)
    loss.backward()
    again = kept[1 + len(rest) :]
    assert sorted(again) == sorted(rest) and len(rest) == 10
    assert first not in again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_train_too(tiny, ids, dtype):
    tiny.to(dtype).loss(ids, ids).backward()
    assert tiny.wte.weight.grad.dtype == dtype
    assert tiny.wte.weight.grad.isfinite().all()


def test_a_loss_without_targets_has_zero_gradients(tiny, ids):
    tiny.loss(ids, torch.full_like(ids, -100)).backward()
    assert all(not p.grad.any() for p in tiny.parameters() if p.grad is not None)


def test_float64_stays_and_int32_targets_are_accepted(tiny, ids):
    exact = tiny.double().loss(ids, ids.int())
    assert exact.dtype == torch.float64
    plain = F.cross_entropy(tiny(ids).flatten(0, 1), ids.flatten())
    torch.testing.assert_close(exact, plain, atol=1e-12, rtol=1e-12)
