"""The filters against transformers', and what each promises."""

import ctypes
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer import GenerationConfig
from tiedgpt.infer.kernels import sampling as kernels
from tiedgpt.infer.sampling import SamplingInput, adjust_logits, filter_logits, sample
from tiedgpt.infer.sequence import SequenceState

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.generation import logits_process as theirs


def generator(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def chosen(config, logits, seen=(), *, n_prompt=0, uniform=0.0):
    """Return the sampled token; raise if no token can be sampled."""
    (found,) = sample([SamplingInput(config, logits, list(seen), n_prompt, len(logits), uniform)])
    if isinstance(found, UserError):
        raise found
    return found.token


def random_logits(seed, size=60):
    return (3 * generator(seed).standard_normal(size)).astype(np.float32)


def distribution(config, logits, seen, **row):
    """Return the filtered logits (V,) over the temperature, -inf for excluded tokens."""
    scores = adjust_logits(config, logits, seen)
    given = SamplingInput(config, logits, seen, 0, len(logits), **row)
    kept = filter_logits(given, scores)
    assert kept.tolist() == kernels.filter_logits(given).tolist()
    whole = np.full(len(logits), -np.inf)
    whole[kept] = scores[kept] / np.float64(config.temperature)
    return whole


def as_transformers(processors, seen, logits):
    scores = torch.from_numpy(logits.copy())[None]
    for processor in processors:
        scores = processor(torch.tensor(seen)[None], scores.clone())
    return scores[0].numpy()


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 5, 200]),
    top_p=st.sampled_from([None, 0.2, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_scores_match_transformers(seed, temperature, top_k, top_p, min_p, penalty):
    logits = random_logits(seed)
    seen = generator(seed).integers(60, size=7).tolist()
    config = GenerationConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    processors = [theirs.RepetitionPenaltyLogitsProcessor(penalty)]
    processors += [theirs.TemperatureLogitsWarper(temperature)]
    processors += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    processors += [theirs.TopPLogitsWarper(top_p)] if top_p and top_p < 1 else []
    processors += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    expected = as_transformers(processors, seen, logits)
    np.testing.assert_allclose(distribution(config, logits, seen), expected, rtol=1e-5)


@pytest.mark.parametrize(("n", "expected"), [(0, 4), (1, 2), (1.3, 2), (3, 4), (1e-3, 1)])
def test_top_n_sigma_matches_llama_cpp(n, expected):
    logits = np.array([*np.log([0.4, 0.3, 0.2, 0.1]), -np.inf], np.float32)
    for temperature in (1.0, 0.1):
        config = GenerationConfig(top_n_sigma=n, temperature=temperature)
        kept = np.isfinite(distribution(config, logits, []))
        assert kept.tolist() == [True] * expected + [False] * (5 - expected)


def test_min_p_keeps_equal_shares_and_all_tokens_at_an_enormous_temperature():
    logits = np.array([0, 0, -1, -np.inf, 3e38, -3e38], np.float32)
    for options, expected in (
        ({"min_p": 1.0}, [4]),
        ({"min_p": 0.5, "temperature": 1e300}, [0, 1, 2, 4, 5]),
        ({"top_p": 0.5, "temperature": 1e300}, [0, 1, 4]),
        ({"xtc_probability": 1.0, "temperature": 1e300}, [5]),
    ):
        ids = np.flatnonzero(distribution(GenerationConfig(**options), logits, []) > -np.inf)
        assert ids.tolist() == expected, options


def kept_by_llama_cpp(llama_cpp, logits, threshold, temperature, top_k, min_p):
    """The ids that llama.cpp's samplers leave."""
    tokens = [(token, float(score), 0.0) for token, score in enumerate(logits)]
    data = (llama_cpp.llama_token_data * len(logits))(*tokens)
    array = llama_cpp.llama_token_data_array(data=data, size=len(data), selected=-1, sorted=False)
    for sampler in (
        llama_cpp.llama_sampler_init_temp(temperature),
        llama_cpp.llama_sampler_init_top_k(top_k),
        llama_cpp.llama_sampler_init_min_p(min_p, 1),
        llama_cpp.llama_sampler_init_xtc(1.0, threshold, 1, 3),
    ):
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    return sorted(array.data[i].id for i in range(array.size))


@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.25, 0.5, 0.6])
@pytest.mark.parametrize(("temperature", "top_k", "min_p"), [(1, 0, 0), (0.7, 9, 0), (2, 0, 0.1)])
def test_xtc_keeps_the_tokens_of_llama_cpp(threshold, temperature, top_k, min_p):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    options = {"temperature": temperature, "top_k": top_k, "min_p": min_p}
    config = GenerationConfig(xtc_probability=1, xtc_threshold=threshold, **options)
    for seed in range(50):
        logits = random_logits(seed, 53)
        expected = kept_by_llama_cpp(llama_cpp, logits, threshold, **options)
        assert np.flatnonzero(np.isfinite(distribution(config, logits, []))).tolist() == expected


@pytest.mark.parametrize(
    ("parts", "threshold", "spared", "expected"),
    [
        ((5, 3, 1, 1), 0.25, (), [1, 2, 3]),
        ((1, 3, 1, 5), 0.25, (), [0, 1, 2]),
        ((5, 3, 1, 1), 0.4, (), [0, 1, 2, 3]),
        ((4, 4, 4, 1), 0.2, (), [2, 3]),
        ((1, 1, 1), 0.0, (), [2]),
        ((5, 3, 1, 1), 0.25, (0,), [0, 1, 2, 3]),
        ((5, 3, 1, 1), 0.25, (1, 2), [1, 2, 3]),
        ((9, 0, 0, 1), 0.05, (), [3]),
        ((9,), 0.1, (), [0]),
    ],
)
def test_xtc_excludes_the_top_choices_but_the_least_likely_and_no_spared_ones(
    parts, threshold, spared, expected
):
    config = GenerationConfig(xtc_probability=0.3, xtc_threshold=threshold)
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(parts, np.float32))
    for uniform in (0.0, 0.29, 0.3, 0.9):
        row = SamplingInput(
            config, logits, [], 0, len(parts), 0.4, {"xtc_uniform": uniform}, spared=spared
        )
        ids = expected if uniform < 0.3 else np.flatnonzero(parts).tolist()
        assert filter_logits(row, logits).tolist() == kernels.filter_logits(row).tolist() == ids


def test_xtc_draws_a_number_of_its_own_and_spares_line_breaks_and_the_ends_of_the_text(tokenizer):
    drawn = np.random.Generator(np.random.PCG64([4, 0])).random(4).tolist()
    model = GPTConfig(
        vocab_size=len(tokenizer), n_positions=8, n_embd=8, n_layer=1, n_head=1,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    config = GenerationConfig(xtc_probability=0.5, seed=4, stop_ids=[7], ignore_eos=True)
    text = SequenceState([1], config, model=model, tokenizer=tokenizer, end_ids=[9])
    rows = [text.sampling_input(random_logits(0, len(tokenizer))) for _ in range(2)]
    assert [x for row in rows for x in (row.uniform, *row.uniforms.values())] == drawn
    (line_break,) = tokenizer.encode("\n")
    assert set(rows[0].spared) == {line_break, tokenizer.eos_token_id, 7, 9}


@given(seed=st.integers(0, 1000))
def test_logit_bias_equals_transformers(seed):
    logits, bias = random_logits(seed), {4: 2.5, 9: -1.0, 11: -math.inf}
    theirs_bias = [[[token], value] for token, value in bias.items()]
    expected = as_transformers([theirs.SequenceBiasLogitsProcessor(theirs_bias)], [1], logits)
    biased = adjust_logits(GenerationConfig(logit_bias=bias), logits, [1])
    np.testing.assert_allclose(biased, expected, rtol=1e-6)


def test_presence_and_frequency_penalties_count_generated_tokens_only():
    logits = np.zeros(8, np.float32)
    cases = ((0.5, 0.25, [1, 0.75]), (0.5, 0, [0.5, 0.5]), (0, 1, [2, 1]))
    for presence, frequency, expected in cases:
        config = GenerationConfig(presence_penalty=presence, frequency_penalty=frequency)
        scores = adjust_logits(config, logits, [1, 2, 3, 3, 4], n_prompt=2)
        assert (-scores).tolist() == [0, 0, 0, *expected, 0, 0, 0]
    assert adjust_logits(GenerationConfig(top_k=5), logits, [1, 2]) is logits


def sequence(prompt, size=4, **options):
    model = GPTConfig(vocab_size=size, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    return SequenceState(prompt, GenerationConfig(**options), model=model)


def test_processors_run_first_and_see_the_text_and_prompt_length():
    def only_after_the_prompt(ids, n_prompt, logits):
        return logits if len(ids) > n_prompt else np.where(np.arange(4) == 2, logits, -np.inf)

    text = sequence([1], temperature=0, processors=[only_after_the_prompt])
    logits = np.array([0, 3, 1, 2], np.float32)
    for expected in (2, 1):
        (found,) = sample([text.sampling_input(logits)])
        assert found.token == expected
        text.append(found, logits)


def test_a_processor_may_modify_its_input_and_must_keep_its_shape():
    def in_place(ids, n_prompt, logits):
        logits[1] = -np.inf
        return logits.tolist()

    logits = np.array([0, 3, 1, 2], np.float32)
    (found,) = sample([sequence([1], temperature=0, processors=[in_place]).sampling_input(logits)])
    assert found.token == 3 and logits[1] == 3
    for wrong in ([0.0], None):
        with pytest.raises(UserError, match="must return logits"):
            sequence([1], processors=[lambda *_, wrong=wrong: wrong]).sampling_input(logits)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 1.0}])
def test_draws_follow_the_models_distribution(options):
    logits = np.array([0.5, 2.0, -np.inf, -1.0, 1.0], np.float32)
    g, config = generator(), GenerationConfig(**options)
    draws = [chosen(config, logits, uniform=g.random()) for _ in range(4000)]
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(np.bincount(draws, minlength=5) / 4000, expected, atol=0.025)


def test_a_draw_uses_one_random_number_and_greedy_none():
    drawn = np.random.Generator(np.random.PCG64([4, 0])).random(3).tolist()
    text = sequence([1], size=60, seed=4, top_k=3)
    assert [text.sampling_input(random_logits(0)).uniform for _ in range(3)] == drawn
    greedy = sequence([1], size=60, seed=4, temperature=0)
    assert greedy.sampling_input(random_logits(0)).uniform == 0


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-300, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = np.array([0.5, 2.0, -1.0], np.float32)
    assert chosen(GenerationConfig(temperature=temperature), logits) == 1


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_nan_scores_are_reported(damage):
    logits = np.array([0.5, damage, -1.0], np.float32)
    with pytest.raises(UserError, match="not numbers"):
        chosen(GenerationConfig(), logits)
