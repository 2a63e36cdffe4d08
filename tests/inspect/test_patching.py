"""Activation patching: the numbers of hooks on transformers' GPT-2, and their invariants."""

import numpy as np
import pytest
import torch

from tests.inspect.conftest import TEXT, random_ids, random_model
from tests.inspect.test_parity import NEAR, theirs
from tiedgpt.inspect import patch

CLEAN, CORRUPTED = random_ids(9), random_ids(9, seed=1)
ANSWER, WRONG = 5, 0


def by_hooks(model, part, layer, place):
    """Return the score of the corrupted text with an activation of the clean text."""
    block, kept = model.transformer.h[layer], []
    module = {"residual": block, "attention": block.attn, "mlp": block.mlp,
              "heads": block.attn.c_proj}[part]  # fmt: skip
    width = model.config.n_embd // model.config.n_head
    at = (slice(None), place)
    if part == "heads":
        at = (slice(None), slice(None), slice(place * width, (place + 1) * width))
    reads = part in ("residual", "heads")

    def put(value):
        if not kept:
            kept.append(value.clone())
            return value
        value = value.clone()
        value[at] = kept[0][at]
        return value

    def before(_, given):
        return (put(given[0]), *given[1:])

    def after(_, __, out):
        return type(out)([put(out[0]), *out[1:]]) if isinstance(out, tuple | list) else put(out)

    hook = (
        module.register_forward_pre_hook(before) if reads else module.register_forward_hook(after)
    )
    with hook, torch.no_grad():
        model(CLEAN[None])
        logits = model(CORRUPTED[None]).logits[0, -1]
    return float(logits[ANSWER] - logits[WRONG])


@pytest.mark.parametrize("kind", ["tied", "untied", "gpt1"])
def test_patching_equals_hooks_on_transformers_model(kind):
    model = theirs(kind)
    found = patch(model, None, CLEAN, corrupted=CORRUPTED, answer=ANSWER, wrong=WRONG)
    for part, places in (("residual", 9), ("attention", 9), ("mlp", 9), ("heads", 2)):
        wanted = [[by_hooks(model, part, n, place) for place in range(places)] for n in range(2)]
        np.testing.assert_allclose(getattr(found, part), wanted, **NEAR)
    with torch.no_grad():
        clean, corrupted = (model(ids[None]).logits[0, -1] for ids in (CLEAN, CORRUPTED))
    assert found.clean == pytest.approx(float(clean[ANSWER] - clean[WRONG]), abs=1e-4)
    assert found.corrupted == pytest.approx(float(corrupted[ANSWER] - corrupted[WRONG]), abs=1e-4)


def test_without_a_wrong_answer_the_score_is_the_logprob():
    model, done = random_model(), []
    options = {"corrupted": CORRUPTED, "progress": lambda *layers: done.append(layers)}
    found = patch(model, None, CLEAN, answer=ANSWER, **options)
    assert done == [(1, 2), (2, 2)]
    with torch.no_grad():
        logprobs = model(CLEAN[None])[0, -1].log_softmax(-1)
    assert found.clean == pytest.approx(float(logprobs[ANSWER]), abs=1e-5) and found.wrong == -1


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_single_different_token_is_restored_by_its_state_alone(norm):
    model, corrupted = random_model(norm=norm), CLEAN.clone()
    corrupted[4] = (corrupted[4] + 1) % 97
    found = patch(model, None, CLEAN, corrupted=corrupted, answer=ANSWER)
    first = found.share(found.residual)[0]
    assert first[4] == pytest.approx(1, abs=1e-4)
    assert np.delete(first, 4) == pytest.approx(np.zeros(8), abs=1e-4)
    for part in ("residual", "attention", "mlp"):
        before = found.share(getattr(found, part))[:, :4]  # causal: these states are equal
        assert before == pytest.approx(np.zeros((2, 4)), abs=1e-4)
    last = found.share(found.mlp)[1]  # the last layer's MLP reaches the answer from the end alone
    assert np.delete(last, 8) == pytest.approx(np.zeros(8), abs=1e-4)


def test_patching_does_not_change_the_model(model, tokenizer):
    model.train()
    other = TEXT.replace("cat", "mat")
    patch(model, tokenizer, TEXT, corrupted=other, answer=3)
    assert model.training and not any(m._forward_hooks for m in model.modules())
