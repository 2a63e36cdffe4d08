"""Perplexity by windows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

from tests.models import TEXT
from tiedgpt.errors import UserError
from tiedgpt.evaluate.texts import Windows, score_text


def transformers_windows(model, ids, context, stride):
    """Nats and tokens of each window in transformers' guide "Perplexity of fixed-length models"."""
    windows, known = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = torch.tensor([ids[begin:end]])
        targets = window.clone()
        targets[:, : known - begin] = -100
        n = int((targets[:, 1:] != -100).sum())
        with torch.no_grad():
            windows.append((float(model(window, labels=targets).loss) * n, n))
        known = end
        if end == len(ids):
            return windows


@pytest.mark.parametrize(("context", "stride"), [(48, 24), (48, 48), (48, 1), (20, 7), (2, 1)])
def test_the_perplexity_equals_transformers_recipe(directory, engine, context, stride):
    model = GPT2LMHeadModel.from_pretrained(directory).eval()
    text = TEXT[:300]
    expected = transformers_windows(model, engine.tokenizer.encode(text), context, stride)
    score = score_text(engine, text, context=context, stride=stride)
    for number, (ours, theirs) in enumerate(zip(score.scores, expected, strict=True)):
        at = f"window {number}, from position {number * stride}"
        assert (ours.nats, ours.tokens) == pytest.approx(theirs, rel=1e-5, abs=1e-4), at
    nats, n = np.sum(expected, 0)
    assert score.perplexity == pytest.approx(np.exp(nats / n), abs=1e-4)


@given(st.integers(0, 100), st.integers(2, 20), st.integers(1, 20))
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(n_ids, context, stride):
    stride = min(stride, context)
    ids = list(range(n_ids))
    scored = []
    for number, (given_ids, targets) in enumerate(Windows(context, stride, False).cut(ids)):
        whole = given_ids + targets
        assert whole == list(range(whole[0], whole[-1] + 1))
        assert len(whole) <= context
        assert number == 0 or len(given_ids) >= context - stride
        scored += targets
    assert scored == [i for i in ids[1:] if stride < context or i % stride]


def test_bits_per_byte_count_the_bytes_of_scored_tokens(engine):
    without, whole = score_text(engine, TEXT), score_text(engine, TEXT, bos=True)
    n_bytes = len(TEXT.encode())
    first = len(engine.tokenizer.token_bytes(engine.tokenizer.encode(TEXT)[0]))
    nats = without.nats * without.tokens
    assert without.bits_per_byte == pytest.approx(nats / math.log(2) / (n_bytes - first))
    assert whole.tokens == without.tokens + 1
    assert whole.bits_per_byte == pytest.approx(whole.nats * whole.tokens / math.log(2) / n_bytes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 49}, "context must be from 2 to the model's 48, got 49"),
        ({"context": 1}, "context must be"),
        ({"stride": 0}, "stride must be from 1 to the context's 48, got 0"),
        ({"context": 10, "stride": 11}, "stride must be"),
    ],
)
def test_impossible_windows_are_refused(engine, options, said):
    with pytest.raises(UserError, match=said):
        score_text(engine, TEXT, **options)
    assert [Windows.of(engine, n).stride for n in (None, 20, 3, 2)] == [24, 10, 1, 1]


@pytest.mark.parametrize("text", ["", "t"])
def test_a_text_without_a_predicted_token_is_refused(engine, text):
    with pytest.raises(UserError, match="too short"):
        score_text(engine, text)
