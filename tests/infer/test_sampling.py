"""The filters against transformers', and what each promises."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt.errors import UserError
from tiedgpt.infer import Sampling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.generation import logits_process as theirs


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 5, 200]),
    top_p=st.sampled_from([None, 0.2, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_scores_are_those_of_transformers(seed, temperature, top_k, top_p, min_p, penalty):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(60, generator=g)
    seen = torch.randint(60, (7,), generator=g)
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    expected = logits[None]
    processors = [theirs.RepetitionPenaltyLogitsProcessor(penalty)]
    processors += [theirs.TemperatureLogitsWarper(temperature)]
    processors += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    processors += [theirs.TopPLogitsWarper(top_p)] if top_p and top_p < 1 else []
    processors += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    for processor in processors:
        expected = processor(seen[None], expected.clone())
    torch.testing.assert_close(sampling.scores(logits, seen.tolist()), expected[0])


def test_draws_follow_the_models_distribution():
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0])
    g = torch.Generator().manual_seed(0)
    draws = torch.tensor([Sampling().choose(logits, [], g) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=4) / 4000
    torch.testing.assert_close(shares, logits.softmax(0), atol=0.025, rtol=0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-300, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.tensor([0.5, 2.0, -1.0])
    assert Sampling(temperature=temperature).choose(logits, [], torch.Generator()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": True},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": "0.1"},
        {"repetition_penalty": 0},
    ],
)
def test_impossible_values_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)
