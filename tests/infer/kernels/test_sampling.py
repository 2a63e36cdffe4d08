"""Compiled sampling chooses what plain numpy chooses, whatever else is in the batch."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt.errors import UserError
from tiedgpt.infer import GenerationConfig, filters
from tiedgpt.infer.filters import log_normalizer
from tiedgpt.infer.kernels import sampling
from tiedgpt.infer.kernels.sampling import score_targets
from tiedgpt.infer.kernels.thread_pool import ThreadPool
from tiedgpt.infer.sampling import SamplingInput, adjust_logits, filter_logits, sample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.generation.logits_process import TopPLogitsWarper

pool = ThreadPool(1)


def choice(logits, uniform=0.0, n_tokens=None, seen=(), n_prompt=0, xtc=None, **options):
    config = GenerationConfig(**options)
    xtc_uniform, spared = xtc or (0.0, ())
    return SamplingInput(
        config, logits, seen, n_prompt, n_tokens or len(logits), uniform,
        {"xtc_uniform": xtc_uniform}, spared,
    )  # fmt: skip


def chosen(logits, uniform, **options):
    """The token and log P of one row."""
    (one,) = sampling.sample(pool, [choice(logits, uniform, **options)])
    return one.token, one.logprob


def assert_equals_numpy(row):
    """Compare all ids that may be drawn, and the id that is drawn."""
    (expected,), (one,) = sample([row]), sampling.sample(pool, [row])
    assert one.token == expected.token
    assert one.logprob == pytest.approx(expected.logprob, abs=1e-5)
    if not row.config.greedy:
        logits = row.logits[: row.n_tokens]
        scores = adjust_logits(row.config, logits, row.seen, row.n_prompt)
        np.testing.assert_array_equal(sampling.filter_logits(row), filter_logits(row, scores))


def peaked(seed, size, sharpness=1.0):
    generator = np.random.default_rng(seed)
    return (sharpness * generator.standard_normal(size)).astype(np.float32)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    size=st.one_of(st.integers(1, 200), st.sampled_from([1_021, 8_191, 50_257, 65_537])),
    sharpness=st.sampled_from([0.01, 0.5, 3.0, 20.0, 1e30]),
    step=st.sampled_from([None, 0.5]),
    ruled_out=st.sampled_from([0.0, 0.3, 0.99]),
    uniform=st.floats(0, 1 - 1e-9),
    xtc=st.tuples(st.sampled_from([0.2, 0.7]), st.sampled_from([(), (0, 3)])),
    temperature=st.sampled_from([2e-5, 0.3, 1.0, 2.5, 30.0, 1e300]),
    top_k=st.sampled_from([None, 1, 5, 40, 5_000]),
    top_p=st.sampled_from([None, 1e-8, 0.2, 0.5, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.05, 0.5, 1.0]),
    top_n_sigma=st.sampled_from([None, 0.0, 0.5, 2.0]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.25]),
)
def test_filters_and_draws_equal_numpys(
    seed, size, sharpness, step, ruled_out, uniform, xtc, **options
):
    logits = peaked(seed, size, sharpness)
    logits = logits if step is None else (logits / step).round() * np.float32(step)
    out = np.random.default_rng(seed + 1).random(size) < ruled_out
    logits[out & (np.arange(size) != seed % size)] = -np.inf
    assert_equals_numpy(choice(logits, uniform, xtc=xtc, **options))


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    bias=st.dictionaries(st.integers(0, 59), st.sampled_from([-math.inf, -3.0, 4.5]), max_size=9),
    top_k=st.sampled_from([None, 5]),
    n_tokens=st.sampled_from([60, 53]),
)
def test_bias_and_penalties_equal_numpys(seed, bias, **options):
    logits, generator = peaked(seed, 60, 3.0), np.random.default_rng(seed)
    seen = generator.integers(60, size=seed % 40).tolist()
    n_prompt = min(seed % 7, len(seen))
    options |= {"seen": seen, "n_prompt": n_prompt, "logit_bias": bias}
    assert_equals_numpy(choice(logits, 0.37, **options))


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([3, 53, 8_191, 50_257]),
    sharpness=st.sampled_from([0.01, 1.0, 3.0]),
    temperature=st.sampled_from([0.7, 1.0]),
    distance=st.sampled_from([0, 1e-10, -1e-10, 1e-9, -1e-9, 1e-8, -1e-8]),
)
def test_shares_and_draws_too_near_a_border_for_float32_equal_numpys(
    seed, size, sharpness, temperature, distance
):
    logits, generator = peaked(seed, size, sharpness), np.random.default_rng(seed)
    p = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-logits, kind="stable")
    n_kept = int(generator.integers(1, size))
    mass = p[order[:n_kept]].sum() / p.sum() * (1 + distance)
    ids = np.sort(order[:n_kept])
    uniform = p[ids[: generator.integers(n_kept)]].sum() / p[ids].sum() * (1 + distance)
    if mass < 1 - 1e-9:
        assert_equals_numpy(choice(logits, uniform, temperature=temperature, top_p=float(mass)))


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([3, 50, 64, 700, 50_000]),
    kinds=st.integers(1, 5),
    mass=st.floats(0.01, 0.99),
)
def test_top_p_keeps_the_first_of_equal_tokens_at_its_edge(seed, size, kinds, mass):
    logits = np.random.default_rng(seed).integers(kinds, size=size).astype(np.float32) / 2
    p = np.exp(logits.astype(np.float64))
    order = np.lexsort((np.arange(size), -logits))
    n_kept = 1 + np.searchsorted(np.cumsum(p[order]) / p.sum(), mass - 1e-12)
    ids = sampling.filter_logits(choice(logits, top_p=mass))
    assert ids.tolist() == np.sort(order[:n_kept]).tolist()


def test_top_k_keeps_all_ties_of_the_kth():
    logits = np.zeros(1000, np.float32)
    logits[::100] = 1
    found = {chosen(logits, u, top_k=3)[0] for u in np.linspace(0, 0.999, 40)}
    assert found == set(range(0, 1000, 100))


def mixed(i, size):
    """One of many rows that differ in everything."""
    generator = np.random.default_rng(i)
    seen = generator.integers(size, size=9 * (i % 4)).tolist()
    return choice(
        peaked(i, size, (0.1, 3, 20)[i % 3]),
        uniform=(0.618 * i) % 1,
        seen=seen,
        n_prompt=min(2, len(seen)),
        logit_bias={int(token): 2.0 for token in generator.integers(size, size=i % 3)},
        temperature=(0.5 * i) % 2,
        top_k=(i % 3) * 50 or None,
        top_p=1 - 0.2 * (i % 2),
        min_p=0.01 * (i % 5),
        top_n_sigma=float(i % 4),
        xtc_probability=0.5 * (i % 3),
        xtc=((0.3 * i) % 1, (5, i)),
        repetition_penalty=1 + 0.1 * (i % 2),
        frequency_penalty=0.5 * (i % 2),
    )


@pytest.mark.parametrize("size", [97, 5_003])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_with_any_threads(size):
    rows = [mixed(i, size) for i in range(24)]
    alone = [sampling.sample(pool, [row])[0] for row in rows]
    assert all(one.token >= 0 for one in alone)
    for threads in (1, 2):
        assert sampling.sample(ThreadPool(threads), rows) == alone
    assert sampling.sample(ThreadPool(3), rows[::-1]) == alone[::-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_beyond_the_tokens_count_for_log_p_and_are_never_drawn(temperature):
    logits = np.zeros(200, np.float32)
    logits[150:] = 5
    rows = [choice(logits, 1 - 1e-9, n, temperature=temperature) for n in (130, 7, 1)]
    got = sampling.sample(pool, rows)
    assert [one.token for one in got] == ([129, 6, 0] if temperature else [0, 0, 0])
    expected = pytest.approx(-log_normalizer(logits), abs=1e-5)
    assert all(one.logprob == expected for one in got)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_report_the_reason_and_others_are_sampled(temperature):
    logits = np.zeros((6, 70), np.float32)
    logits[0] = -np.inf
    logits[1, 5] = np.nan
    logits[2, 69] = np.inf
    logits[3] = [-3e38] * 69 + [3e38]
    logits[4, 1:] = -np.inf
    options = {"temperature": temperature, "top_p": 0.9, "uniform": 0.5}
    none, nan, inf, *got, last = sampling.sample(pool, [choice(row, **options) for row in logits])
    assert "no token is left" in str(none)
    assert "not numbers" in str(nan) and "not numbers" in str(inf)
    assert [(one.token, one.logprob) for one in got] == [(69, 0), (0, 0)]
    assert 0 <= last.token < 70


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1000), size=st.sampled_from([1, 15, 16, 97, 5_003]), ties=st.booleans())
def test_targets_have_the_log_p_and_the_rank_of_a_sort(seed, size, ties):
    logits = np.stack([peaked(seed + i, size) for i in range(3)])
    logits = logits.round() if ties else logits
    targets = np.random.default_rng(seed).integers(size, size=3)
    logprobs, ranks = score_targets(pool, logits, targets)
    n = 1 + seed % size
    beyond = score_targets(pool, logits, targets, n)
    assert beyond == (logprobs, (numpys := filters.score_targets(logits, targets, n))[1])
    expected = torch.from_numpy(logits).double().log_softmax(1)[torch.arange(3), targets].tolist()
    assert logprobs == pytest.approx(expected, abs=1e-5) == numpys[0]
    for row, target, rank in zip(logits, targets, ranks, strict=True):
        assert rank == 1 + np.argsort(-row, kind="stable").tolist().index(target)
        likeliest = [float(row[id]) for id, _ in filters.likeliest(row, 3, n)]
        assert likeliest == sorted(row[:n].tolist(), reverse=True)[:3]


def test_at_an_enormous_temperature_the_remaining_tokens_are_equally_likely():
    logits = peaked(1, 40, 20.0)
    logits[::4] = -np.inf
    tokens = [chosen(logits, (i + 0.5) / 30, temperature=1e300)[0] for i in range(30)]
    assert tokens == np.flatnonzero(np.isfinite(logits)).tolist()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_excluded_tokens_are_not_drawn_at_the_ends(uniform):
    logits = np.zeros(100, np.float32)
    logits[[*range(20), *range(70, 100)]] = -np.inf
    for options in ({}, {"top_k": 60}, {"top_p": 0.999999}, {"temperature": 0.3}):
        assert chosen(logits, uniform, **options)[0] == (69 if uniform else 20)


@pytest.mark.parametrize(
    "options", [{"seen": [60], "presence_penalty": 1.0}, {"logit_bias": {70: 1.0}}]
)
def test_ids_without_a_row_are_refused(options):
    with pytest.raises(UserError, match="outside the 60 logits"):
        chosen(peaked(1, 60), 0.5, **options)


TIES = [
    (5, 3, 1, 1), (4, 3, 2, 1), (7, 2, 1), (6, 3, 1), (3, 3, 2, 2), (5, 2, 2, 1), (9, 1), (1, 1, 1),
    (1,) * 7, (1,) * 8, (1,) * 10, (50, 25, 10, 5, 5, 3, 2), (30, 20, 20, 10, 10, 5, 5),
]  # fmt: skip
"""Probabilities, the largest first, in parts of their sum."""


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("parts", TIES, ids=str)
def test_top_p_at_an_exact_sum_keeps_the_smallest_set_that_reaches_it(parts, temperature):
    """Compare with a count by hand, and with transformers where float32 logits fall short of p."""
    p = np.array(parts) / sum(parts)
    logits = (np.log(p) * temperature).astype(np.float32)
    scores = torch.from_numpy(logits.astype(np.float64) / temperature)[None]
    sums = scores[0].softmax(0).cumsum(0)
    for n in range(1, len(parts)):
        mass = sum(parts[:n]) / sum(parts)
        row = choice(logits, 1 - 1e-16, top_p=mass, temperature=temperature)
        n_transformers = int(torch.isfinite(TopPLogitsWarper(mass)(None, scores)).sum())
        n_kept = n if sums[n - 1] > mass - 1e-12 else n_transformers
        assert filter_logits(row, logits).tolist() == sampling.filter_logits(row).tolist()
        assert sampling.filter_logits(row).tolist() == [*range(n_kept)]
        assert chosen(logits, 1 - 1e-16, top_p=mass, temperature=temperature)[0] == n_kept - 1


@pytest.mark.parametrize("sharpness", [0.01, 1, 5])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_top_p_keeps_the_tokens_of_transformers_in_float64(sharpness, top_p):
    logits = np.sort(peaked(5, 50_257, sharpness))[::-1].copy()
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    n_kept = int(torch.isfinite(TopPLogitsWarper(top_p)(None, scores)).sum())
    row = choice(logits, 1 - 1e-9, top_p=top_p)
    assert len(filter_logits(row, logits)) == len(sampling.filter_logits(row)) == n_kept
