"""95 % intervals are Wilson's and Student's, by the lengths of groups; few groups give none."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tiedgpt.evaluate.intervals import ratio_interval, share_interval
from tiedgpt.evaluate.texts import TextScore, Windows, WindowScore


@pytest.mark.parametrize(
    ("scores", "basis"),
    [
        ([WindowScore(1.0, 64, 1, 0)] * 110, "one text of 7,040 tokens: an interval needs 7,680"),
        ([WindowScore(1.0, 9, 1, n // 2) for n in range(4)], "2 documents: an interval needs 3"),
    ],
)
def test_too_few_groups_have_no_interval(scores, basis):
    told = TextScore(Windows(128, 64, False), scores).to_json()
    assert told["nats_interval"] is None and told["perplexity_interval"] is None
    assert basis in told["interval_basis"]


def test_one_text_is_divided_into_five_stretches_by_the_places_of_its_windows():
    draws = np.random.default_rng(0)
    scores = [WindowScore(float(draws.normal(64)), n, 1, 0) for n in [100, 28] * 40]
    nats = [sum(score.nats for score in scores[n : n + 16]) for n in range(0, 80, 16)]
    for context, length, is_enough in ((64, 28, True), (64, 27, False), (86, 28, False)):
        scores[-1] = replace(scores[-1], tokens=length)
        groups = TextScore(Windows(context, 64, False), scores).groups
        assert groups[0] == pytest.approx(nats if is_enough else [])
        assert [*groups.tokens] == ([1024] * 5 if is_enough else [])
        assert ("5 stretches of one text, 1,024 tokens each" == groups.basis) is is_enough
    assert groups.basis == "one text of 5,120 tokens: an interval needs 5,160, or 3 documents"


def test_intervals_of_shares_are_wilsons():
    assert share_interval(5, 6) == pytest.approx((0.43650, 0.96995), abs=1e-5)
    assert share_interval(0, 20)[0] == 0 and share_interval(20, 20)[1] == 1  # both by rounding


def test_intervals_of_a_mean_are_students():
    for n in (*range(2, 23), 40, 90):  # of n - 1 degrees
        values = np.arange(n) % 2
        low, high = ratio_interval(values, [1] * n)
        assert (low + high) / 2 == pytest.approx(values.mean())
        x = np.linspace(0, (high - low) / 2 / (values.std(ddof=1) / n**0.5), 10_001)
        density = math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt((n - 1) * math.pi)
        probs = density * (1 + x * x / (n - 1)) ** (-n / 2) * x[1]
        assert probs[1:-1].sum() + probs[[0, -1]].mean() == pytest.approx(
            0.475, abs=3e-5 if n < 22 else 4e-4
        )
    assert np.isnan(ratio_interval([1.0], [1])).all()


@pytest.mark.parametrize(
    ("counts", "student"),
    [
        ((3, 5, 7, 13, 19), 12.706), ((3, 13, 17, 19), 4.303), ((5, 7, 11, 13, 19, 23), 3.182),
        ((10,) * 3, 4.303), ((10,) * 10, 2.262),
    ],
)  # fmt: skip
def test_documents_of_any_lengths_have_the_degrees_of_the_quadratic_form(counts, student):
    ratios = np.random.default_rng(0).normal(3, 0.5, len(counts))
    halves = [(n, size) for n, count in enumerate(counts) for size in (count // 2, -(-count // 2))]
    scores = [WindowScore(ratios[n] * size, size, 1, n) for n, size in halves]
    weights = np.divide(counts, sum(counts))
    centring = np.eye(len(counts)) - weights
    form = centring.T @ np.diag(weights**2) @ centring
    reach = student * math.sqrt(ratios @ form @ ratios * (weights @ weights) / np.trace(form))
    expected = np.maximum(0, weights @ ratios + np.array([-reach, reach]))
    told = TextScore(Windows(128, 128, False), scores).to_json()
    assert told["nats_interval"] == pytest.approx(expected)
    assert told["perplexity_interval"] == pytest.approx(np.exp(expected))
