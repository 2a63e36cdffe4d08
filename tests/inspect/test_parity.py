"""The numbers agree with those computed from transformers' own states, attentions and logits."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tests.inspect.conftest import random_ids
from tiedgpt.inspect import attention, dot, lens, positions

SHAPE = {"vocab_size": 97, "n_positions": 80, "n_embd": 16, "n_layer": 2, "n_head": 2}
IDS = random_ids()
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def theirs(kind: str):
    """A model of transformers with large weights: GPT-2, untied GPT-2, GPT-1."""
    torch.manual_seed(3)
    names = {"bos_token_id": 1, "eos_token_id": 1, "attn_implementation": "eager"}
    if kind == "gpt1":
        model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**SHAPE, attn_implementation="eager"))
    else:
        tied = kind == "tied"
        model = GPT2LMHeadModel(GPT2Config(**SHAPE, **names, tie_word_embeddings=tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, 0.3)
    return model.eval()


@pytest.fixture(params=["tied", "untied", "gpt1"])
def case(request):
    model = theirs(request.param)
    with torch.no_grad():
        out = model(IDS[None], output_hidden_states=True, output_attentions=True)
    states = torch.stack(out.hidden_states)[:, 0]
    return model, out.logits[0], states, torch.stack(out.attentions)[:, 0]


def test_positions_equal_transformers_logits(case):
    model, logits, _, _ = case
    found = positions(model, None, IDS, top=5)
    logprobs = logits.log_softmax(-1)
    true = logprobs[:-1].gather(1, IDS[1:, None])[:, 0]
    np.testing.assert_allclose(found.logprob[:-1], true, **NEAR)
    np.testing.assert_allclose(found.surprisal_bits[:-1], -true / np.log(2), **NEAR)
    entropy = torch.distributions.Categorical(logits=logits).entropy() / np.log(2)
    np.testing.assert_allclose(found.entropy_bits, entropy, **NEAR)
    top = logprobs.topk(5)
    np.testing.assert_array_equal(found.top_ids, top.indices)
    np.testing.assert_allclose(found.top_logprob, top.values, **NEAR)
    order = logits[:-1].argsort(descending=True)
    np.testing.assert_array_equal(found.rank[:-1], 1 + (order == IDS[1:, None]).int().argmax(1))
    loss = model(IDS[None], labels=IDS[None]).loss.detach()
    assert found.loss == pytest.approx(float(loss), abs=1e-4)
    assert np.isnan(found.logprob[-1]) and found.rank[-1] == 0 and found.target[-1] == -1


def test_lens_normalises_each_state_of_transformers_by_its_own_statistics(case):
    model, logits, states, _ = case
    found = lens(model, None, IDS)
    pre = hasattr(model.transformer, "ln_f")  # their last state is after it
    final = logits.log_softmax(-1)
    for layer, state in enumerate(states):
        last = layer == len(states) - 1
        with torch.no_grad():
            read = model.transformer.ln_f(state) if pre and not last else state
            logprobs = model.lm_head(read).log_softmax(-1)
        np.testing.assert_allclose(found.top_logprob[layer], logprobs.topk(5).values, **NEAR)
        true = logprobs[:-1].gather(1, IDS[1:, None])[:, 0]
        np.testing.assert_allclose(found.target_logprob[layer, :-1], true, **NEAR)
        apart = (final.exp() * (final - logprobs)).sum(-1) / np.log(2)
        np.testing.assert_allclose(found.kl_bits[layer], apart, **NEAR)
        if not (pre and last):
            np.testing.assert_allclose(found.state_norm[layer], state.norm(dim=-1), **NEAR)
        watched = logprobs[-1, torch.from_numpy(found.watch)]
        np.testing.assert_allclose(found.watch_logprob[layer], watched, **NEAR)
    assert found.layers == ("wte + wpe", "h.0", "h.1")
    np.testing.assert_array_equal(found.watch, [*dict.fromkeys(found.top_ids[::-1, -1, 0])])
    between, blocks = [], model.transformer.h
    for reader in [block.ln_2 for block in blocks] if pre else [block.mlp for block in blocks]:
        reader.register_forward_pre_hook(lambda _, x: between.append(x[0][0].norm(dim=-1)))
    with torch.no_grad():
        model(IDS[None])
    more = lens(model, None, IDS, after_attention=True)
    np.testing.assert_allclose(more.state_norm[1::2], np.stack(between[:2]), **NEAR)
    np.testing.assert_array_equal(more.top_logprob[::2], found.top_logprob)
    assert more.layers == ("wte + wpe", "h.0.attn", "h.0", "h.1.attn", "h.1")


def test_dot_equals_transformers_logit_and_its_parts(case):
    model, logits, states, _ = case
    found = dot(model, None, IDS, position=40, top=97)
    h, rows = states[-1][40], model.lm_head.weight.detach()
    np.testing.assert_allclose(found.logit, logits[40][found.ids], **NEAR)
    np.testing.assert_allclose(found.prob, logits[40].softmax(-1)[found.ids], **NEAR)
    np.testing.assert_allclose(found.h_norm * found.row_norm * found.cos, found.logit, **NEAR)
    np.testing.assert_allclose(found.all_norm, rows.norm(dim=1), **NEAR)
    np.testing.assert_allclose(found.all_cos, torch.cosine_similarity(rows, h[None]), **NEAR)
    centred = rows - rows.mean(0)
    np.testing.assert_allclose(found.all_centred_norm, centred.norm(dim=1), **NEAR)
    cos = torch.cosine_similarity(centred, h[None])
    np.testing.assert_allclose(found.all_centred_cos, cos, **NEAR)
    norm = model.transformer.h[-1].ln_2 if model.config.model_type == "openai-gpt" else None
    norm = norm or model.transformer.ln_f
    np.testing.assert_allclose(found.bias_part, (rows @ norm.bias.detach())[found.ids], **NEAR)
    context = rows @ (h - norm.bias.detach())
    np.testing.assert_allclose(found.gain_part, context[found.ids], **NEAR)
    assert not found.head_bias.any()
    by_cos = found.all_cos.argsort()[::-1]
    np.testing.assert_array_equal(by_cos[found.rank_cos - 1], found.ids)
    body = model.transformer
    np.testing.assert_allclose(found.h, h, **NEAR)
    np.testing.assert_allclose(found.rows @ found.h, logits[40][found.ids], **NEAR)
    places = body.positions_embed if hasattr(body, "positions_embed") else body.wpe
    tokens = body.tokens_embed if hasattr(body, "tokens_embed") else body.wte
    np.testing.assert_array_equal(found.row_read, tokens.weight.detach()[IDS[40]])
    np.testing.assert_array_equal(found.row_place, places.weight.detach()[40])


def test_attention_and_states_equal_transformers(case):
    model, _, states, attentions = case
    for layer in range(2):
        found = attention(model, None, IDS, layer=layer)
        np.testing.assert_allclose(found.patterns, attentions[layer], **NEAR)
        logits = found.queries @ found.keys.swapaxes(1, 2) / np.sqrt(found.keys.shape[-1])
        weights = np.exp(logits) * np.tri(len(IDS))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(weights, found.patterns, **NEAR)
    entropy = torch.distributions.Categorical(probs=attentions[:, :, 1:]).entropy() / np.log(2)
    np.testing.assert_allclose(found.entropy, entropy.mean(-1), **NEAR)
    np.testing.assert_allclose(found.first_share, attentions[:, :, 1:, 0].mean(-1), **NEAR)
    before = attentions[:, :, 1:].diagonal(dim1=2, dim2=3).mean(-1)
    np.testing.assert_allclose(found.previous_share, before, **NEAR)
    np.testing.assert_allclose(found.states[:-1], states[:-1], **NEAR)
