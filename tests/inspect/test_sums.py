"""Sums and invariants of the inspections, in every kind of model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.inspect.conftest import random_ids, random_model
from tiedgpt.inspect import ablate, attention, dot, gradient_split, positions, vocabulary
from tiedgpt.tie.heads import Unembed

KINDS = {
    "norm": st.sampled_from(["pre", "post"]),
    "tied": st.booleans(),
    "bias": st.booleans(),
    "windows": st.sampled_from([None, (0, 5)]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "seed": st.integers(0, 1000),
}
MODELS = st.builds(random_model, **KINDS)
LENGTHS = st.integers(2, 80)


def near(model):
    return {"rel": 1e-6 if model.wpe.weight.dtype == torch.float32 else 1e-12, "abs": 0}


@settings(max_examples=25)
@given(MODELS, LENGTHS, st.booleans())
def test_the_gradient_of_w_is_the_sum_of_its_parts(model, n, arrays):
    ids = random_ids(n)
    found = gradient_split(model, None, ids, arrays=arrays)
    assert found.residual <= near(model)["rel"]
    loss = model.loss(ids[None, :-1], ids[None, 1:])
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), **near(model))
    head = model.wte.weight if model.head is None else model.head.weight
    whole = {"wte.weight": model.wte.weight.grad.numpy(), found.predicts: head.grad.numpy()}
    assert found.reads == "wte.weight"
    assert found.predicts == ("wte.weight" if model.head is None else "head.weight")
    assert np.linalg.norm(found.rows_read) == pytest.approx(found.norm_read, **near(model))
    assert np.linalg.norm(found.rows_predict) == pytest.approx(found.norm_predict, **near(model))
    if not arrays:
        assert found.read is None
    elif model.head is None:
        apart = np.linalg.norm(found.read + found.predict - whole["wte.weight"])
        assert apart <= near(model)["rel"] * np.linalg.norm(whole["wte.weight"])
        assert np.vdot(found.read, found.predict) == pytest.approx(
            found.cosine * found.norm_read * found.norm_predict, rel=1e-4, abs=1e-9
        )
    else:
        for part, name in ((found.read, "wte.weight"), (found.predict, "head.weight")):
            apart = np.linalg.norm(part - whole[name])
            assert apart <= near(model)["rel"] * np.linalg.norm(whole[name])


def test_only_tokens_of_the_text_are_read_and_all_are_predicted():
    found = gradient_split(random_model(), None, [5, 9, 5, 7])
    assert np.flatnonzero(found.rows_read).tolist() == [5, 9]  # the last is only predicted
    assert (found.rows_predict > 0).all()


@settings(max_examples=25)
@given(MODELS, LENGTHS)
def test_attention_sums_to_1_gives_the_models_own_output_and_respects_the_band(model, n):
    ids, outputs = random_ids(n), []
    attn = model.h[1].attn
    hook = attn.c_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0][0]))
    qkv = []
    other = attn.c_attn.register_forward_hook(lambda _, __, out: qkv.append(out[0]))
    found = attention(model, None, ids, layer=-1)
    hook.remove(), other.remove()
    assert found.patterns.sum(-1) == pytest.approx(np.ones((2, n)), **near(model))
    values = qkv[0].unflatten(-1, (3, 2, 8))[:, 2].transpose(0, 1).detach()
    mixed = torch.from_numpy(found.patterns) @ values
    torch.testing.assert_close(mixed.transpose(0, 1).flatten(1), outputs[0], rtol=1e-4, atol=1e-5)
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = distance >= 0
    if model.config.attention_windows:
        seen &= distance < 5
    assert ((found.patterns > 0) <= seen).all()


@settings(max_examples=15)
@given(MODELS, st.integers(2, 80), st.data())
def test_a_later_token_changes_no_earlier_prediction(model, n, data):
    at = data.draw(st.integers(0, n - 1))
    found = positions(model, None, random_ids(n), replace_at=at)
    assert not found.max_abs_change[:at].any()
    assert found.max_abs_change[at] > 0
    assert found.replaced[0] == at and found.replaced[1] != found.replaced[2]


@settings(max_examples=10)
@given(MODELS, st.sampled_from(["zero", "mean"]))
def test_ablation_equals_a_model_without_the_part(model, mode):
    ids, done = random_ids(20), []
    found = ablate(model, None, ids, mode=mode, progress=lambda *layers: done.append(layers))
    assert done == [(1, 2), (2, 2)]
    loss = lambda: float(model.loss(ids[None, :-1], ids[None, 1:]).detach())  # noqa: E731
    assert found.loss == pytest.approx(loss(), rel=1e-5)
    if mode == "zero":
        for layer, block in enumerate(model.h):
            for changes, part in ((found.attention, block.attn), (found.mlp, block.mlp)):
                kept = {n: p.detach().clone() for n, p in part.c_proj.named_parameters()}
                for parameter in part.c_proj.parameters():
                    parameter.data.zero_()
                assert changes[layer] == pytest.approx(loss() - found.loss, abs=1e-5)
                part.c_proj.load_state_dict(kept)
            for head in range(2):
                kept = block.attn.c_proj.weight.detach().clone()
                block.attn.c_proj.weight.data[:, 8 * head : 8 * head + 8] = 0
                assert found.heads[layer, head] == pytest.approx(loss() - found.loss, abs=1e-5)
                block.attn.c_proj.weight.data.copy_(kept)
    else:

        def mean_head(_, given):
            x = given[0].clone()
            x[..., :8] = x[:, :, :8].mean(1, keepdim=True)
            return x

        hook = model.h[0].attn.c_proj.register_forward_pre_hook(mean_head)
        h = model.body(ids[None])[0, :-1]  # the mean is over all positions, the last, too
        hook.remove()
        without = float(model.head_loss(h, ids[1:]).detach())
        assert found.heads[0, 0] == pytest.approx(without - found.loss, abs=1e-5)


def test_subtracting_the_mean_row_changes_only_unidentified_numbers():
    model, ids = random_model(tied=False), random_ids()
    before = dot(model, None, ids, top=97), positions(model, None, ids), vocabulary(model)
    with torch.no_grad():
        model.head.weight -= model.head.weight.mean(0)
    after = dot(model, None, ids, top=97), positions(model, None, ids), vocabulary(model)
    assert after[1].loss == pytest.approx(before[1].loss, rel=1e-5)
    np.testing.assert_allclose(after[0].prob, before[0].prob, rtol=1e-4)
    np.testing.assert_allclose(after[0].centred_cos, before[0].centred_cos, atol=1e-5)
    old, new = before[2].matrices[1], after[2].matrices[1]
    np.testing.assert_allclose(new.centred_norm, old.centred_norm, rtol=1e-4)
    assert np.abs(new.norm - old.norm).max() > 0.01
    np.testing.assert_allclose(new.norm, new.centred_norm, rtol=1e-4)


def test_a_head_that_computes_its_rows_is_inspected():
    plain, model = random_model(tied=False), random_model(tied=False)
    ids = random_ids()
    low_rank = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 97))
    model.head = low_rank
    found = dot(model, None, ids, top=97)
    rows = (low_rank[1].weight @ low_rank[0].weight).detach()
    np.testing.assert_allclose(found.all_norm, rows.norm(dim=1), rtol=1e-4)
    np.testing.assert_allclose(
        found.head_bias, low_rank[1].bias.detach()[found.ids], rtol=1e-4, atol=1e-6
    )
    model.head = Unembed(model.wte, nn.Parameter(torch.randn(97)))
    found = dot(model, None, ids, top=97)
    assert (found.matrix, found.does) == ("wte", "reads and predicts")
    np.testing.assert_allclose(
        found.logit, found.bias_part + found.gain_part + found.head_bias, rtol=1e-4, atol=1e-4
    )
    assert dot(plain, None, ids).matrix == "head.weight"
    assert len(vocabulary(model).matrices) == 1 and len(vocabulary(plain).matrices) == 2
