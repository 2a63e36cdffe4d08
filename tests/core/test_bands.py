"""GPT-3's locally banded layers, and models without biases."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt import GPT, GPTConfig
from tiedgpt.core.cache import KVCache
from tiedgpt.core.layers import banded_attention
from tiedgpt.errors import UserError


def naive(q, k, v, window):
    """Softmax over a T x T mask, written out."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = (j > i) | (j <= i - window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 320), st.integers(0, 2**31))
def test_a_band_equals_the_masked_softmax_with_its_gradients(length, window, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 3, length, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    ours, theirs = banded_attention(q, k, v, window, 0.0), naive(q, k, v, window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@pytest.fixture
def banded(tiny: GPT) -> GPT:
    """Layers 0 and 2 see all, layer 1 sees five positions."""
    model = GPT(replace(tiny.config, attention_windows=(0, 5))).eval()
    model.load_state_dict(tiny.state_dict())
    return model


def test_windows_repeat_over_the_layers_and_add_no_parameters(banded, tiny):
    assert [banded.config.window(layer) for layer in range(3)] == [None, 5, None]
    assert sum(p.numel() for p in banded.parameters()) == tiny.config.parameter_count()
    assert banded.config.parameter_count() == tiny.config.parameter_count()


def test_a_banded_model_equals_a_naive_mask_in_its_banded_layers(banded, tiny, ids, monkeypatch):
    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        return naive(q, k, v, 5 if attend.layer.pop(0) == 1 else q.shape[2])

    attend.layer = [0, 1, 2]
    expected = banded(ids)
    assert (expected - tiny(ids)).abs().max() > 0.1
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(tiny(ids), expected, rtol=0, atol=2e-5)


def test_tokens_outside_every_band_change_nothing(ids):
    torch.manual_seed(1)
    config = GPTConfig(
        vocab_size=97, n_positions=24, n_embd=32, n_layer=2, n_head=4, attention_windows=(4,)
    )
    model = GPT(config).eval()
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 97
    apart = (model(changed) - model(ids)).abs().amax(dim=(0, 2))
    assert (apart[:7] > 0).all(), "two layers of bands of 4 reach 6 positions back"
    assert (apart[7:] == 0).all()


@pytest.mark.parametrize("fixture", ["tiny", "banded"])
@pytest.mark.parametrize("pieces", [[24], [1] * 24, [10, 1, 1, 12], [1, 2, 21], [23, 1]])
@torch.no_grad()
def test_a_cache_fed_in_chunks_gives_the_logits_of_the_whole(request, ids, pieces, fixture):
    model = request.getfixturevalue(fixture)
    cache = KVCache.allocate(model.config, batch_size=3)
    logits = [model(piece, cache) for piece in torch.split(ids, pieces, dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(ids), rtol=1e-5, atol=2e-6)
    assert cache.lengths == [24] * 3 and cache.attention_mask(1, 5) == (20, None)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(1, 4), st.booleans())
@torch.no_grad()
def test_ragged_prompts_in_one_cache_give_the_results_of_solo_runs(lengths, n_new, is_banded):
    torch.manual_seed(len(lengths))
    config = GPTConfig(
        vocab_size=97, n_positions=24, n_embd=32, n_layer=2, n_head=4,
        attention_windows=(0, 3) if is_banded else None,
    )  # fmt: skip
    model = GPT(config).eval()
    prompts = [torch.randint(97, (1, length + n_new)) for length in lengths]
    cache = KVCache.allocate(config, batch_size=len(prompts))
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        model(prompt[:, :length], cache.rows(row, row + 1))
    cache.lengths = list(lengths)
    new = torch.cat([p[:, n:] for p, n in zip(prompts, lengths, strict=True)])
    together = model(new, cache)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        torch.testing.assert_close(together[row], model(prompt)[0, length:], rtol=0, atol=1e-5)


def test_attention_scores_of_t_by_t_are_never_allocated(monkeypatch):
    seen = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention",
        lambda q, k, v, **more: seen.append((q @ k.mT).numel()) or real(q, k, v, **more),
    )  # fmt: skip
    q = torch.randn(1, 1, 1000, 8)
    banded_attention(q, q, q, 32, 0.0)
    assert sum(seen) < 1000 * 1000 / 10


@pytest.mark.parametrize("windows", [(), (1, 2, 3, 4), (-1,), (2.0,), (True,), "ab", 5])
def test_invalid_windows_are_refused(tiny_config, windows):
    with pytest.raises(UserError, match="attention_windows"):
        replace(tiny_config, attention_windows=windows)


def test_a_window_as_long_as_the_context_equals_no_window(tiny_config):
    assert replace(tiny_config, attention_windows=(24, 0)).attention_windows is None


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_bias_false_removes_all_biases_as_the_formula_counts(tiny_config, ids, norm):
    config = replace(tiny_config, bias=False, norm=norm)
    model = GPT(config)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()
    zeros = GPT(replace(config, bias=True)).eval()
    zeros.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model.eval()(ids), zeros(ids))
