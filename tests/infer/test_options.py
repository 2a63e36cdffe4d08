"""What may be asked of a completion beyond its length and temperature."""

import math

import numpy as np
import pytest
import torch

from tiedgpt.errors import UserError
from tiedgpt.infer import GenerationConfig


def test_a_stop_id_ends_the_text_as_the_end_of_text_does(engine):
    whole = engine.generate([5, 6], max_new_tokens=20, temperature=0)
    stop = whole.ids[3]
    n = whole.ids.index(stop) + 1
    cut = engine.generate([5, 6], max_new_tokens=20, temperature=0, stop_ids=[stop])
    assert (cut.ids, cut.finish_reason) == (whole.ids[:n], "stop")
    assert cut.text == engine.tokenizer.decode(whole.ids[: n - 1])


def test_the_likeliest_tokens_are_told_in_order(engine):
    completion = engine.generate([5, 6], max_new_tokens=5, seed=1, top_logprobs=4, stop_ids=[])
    expected = engine.model(torch.tensor([[5, 6, *completion.ids]])).log_softmax(-1)[0, 1:-1]
    best = expected.topk(4)
    assert [[i for i, _ in told] for told in completion.top_logprobs] == best.indices.tolist()
    told = torch.tensor([[value for _, value in told] for told in completion.top_logprobs])
    torch.testing.assert_close(told, best.values, atol=1e-4, rtol=1e-4)


def test_the_prompts_own_tokens_are_scored(engine):
    prompt = [5, 6, 7, 8, 9]
    expected = engine.model(torch.tensor([prompt])).log_softmax(-1)[0]
    completion = engine.generate(prompt, max_new_tokens=3, temperature=0, prompt_logprobs=2)
    own = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.prompt_logprobs), own, atol=1e-4, rtol=1e-4)
    best = expected[:-1].topk(2).indices.tolist()
    assert [[i for i, _ in told] for told in completion.prompt_top_logprobs] == best
    only = engine.generate([prompt, [3]], max_new_tokens=3, temperature=0, prompt_logprobs=True)
    assert only[0].prompt_logprobs == pytest.approx(completion.prompt_logprobs, abs=1e-5)
    assert only[0].prompt_top_logprobs == [] and only[1].prompt_logprobs == []
    assert only[0].ids == completion.ids


def test_a_window_that_slides_scores_the_prompt_once(engine):
    completion = engine.generate(
        [7] * 40, max_new_tokens=30, temperature=0, context_end="slide", prompt_logprobs=True
    )
    assert completion.dropped and len(completion.prompt_logprobs) == 39


def test_words_that_are_ruled_out_do_not_appear(engine):
    whole = engine.generate("the", max_new_tokens=20, temperature=0)
    pair = whole.ids[2:4]
    other = engine.generate("the", max_new_tokens=20, temperature=0, bad_words=[pair])
    assert pair not in [other.ids[i : i + 2] for i in range(19)]
    never = engine.generate("the", max_new_tokens=9, temperature=0, logit_bias={whole.ids[0]: -99})
    assert never.ids[0] != whole.ids[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"temperature": True},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"typical_p": 0},
        {"min_p": -0.1},
        {"min_p": "0.1"},
        {"repetition_penalty": 0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: math.inf}},
        {"logit_bias": [3]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [[]]},
        {"bad_words": [[1.5]]},
        {"stop": [""]},
        {"stop": 3},
        {"stop": b"a"},
        {"stop_ids": 3},
        {"stop_ids": "3"},
        {"stop_ids": [True]},
        {"stop_ids": [-1]},
        {"seed": -1},
        {"seed": 1 << 64},
        {"max_new_tokens": 0},
        {"n": 0},
        {"timeout": -1},
        {"top_logprobs": -1},
        {"prompt_logprobs": -1},
        {"draft_tokens": 0},
        {"speculate": "oracle"},
        {"context_end": "wrap"},
        {"processors": len},
        {"processors": [None]},
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=rf"^{name} must .*, got "):
        GenerationConfig(**wrong)


def test_a_refusal_says_what_is_possible():
    with pytest.raises(UserError) as refused:
        GenerationConfig(temperature=-1)
    assert str(refused.value) == "temperature must be a finite number >= 0, got -1"


def test_none_means_an_options_default():
    names = GenerationConfig.__dataclass_fields__
    assert GenerationConfig(**dict.fromkeys(names)) == GenerationConfig()
    assert GenerationConfig().temperature == 1.0


def test_numbers_may_be_of_numpy_or_torch():
    config = GenerationConfig(
        seed=np.int64(3), top_k=torch.tensor(5), temperature=np.float32(0.5),
        stop_ids=np.array([3, 4]), prompt_logprobs=np.int32(2), logit_bias={np.int64(3): 1},
    )  # fmt: skip
    assert (config.seed, config.top_k, config.temperature) == (3, 5, 0.5)
    assert config.stop_ids == (3, 4) and config.prompt_logprobs == 2
    assert type(config.seed) is type(config.top_k) is int


def test_one_is_true_where_a_choice_is_true():
    for true in (True, 1, np.True_):
        assert GenerationConfig(num_beams=2, early_stopping=true).early_stopping is True


def test_an_option_at_its_default_contradicts_nothing():
    GenerationConfig(num_beams=2, stop=[], stop_ids=np.array([], int), top_k=None, temperature=0)


def test_names_of_other_libraries_are_told_apart_from_misspelt_ones(engine):
    for name, meant in {
        "max_length": "max_new_tokens",
        "do_sample": "temperature",
        "max_num_seqs": "slots",
        "temprature": "temperature",
    }.items():
        with pytest.raises(TypeError, match=rf"{name} is no option of .*did you mean {meant}\?"):
            engine.generate("the", **{name: 1})


def test_a_length_penalty_stays_within_finite_numbers(engine):
    for penalty in (500, -500):
        with pytest.raises(UserError, match="length_penalty must be a finite number"):
            engine.generate("the", num_beams=2, length_penalty=penalty)
    for penalty in (50, -50):
        found = engine.generate("the", num_beams=2, length_penalty=penalty, max_new_tokens=9)
        assert found.ids


def test_a_generation_says_in_a_line_how_it_stands(engine):
    generation = engine.submit("the", max_new_tokens=3, temperature=0, stop_ids=[])
    text = generation.result().text
    assert repr(generation) == f"<Generation: length after 3 tokens, {' '.join(text.split())!r}>"
    failed = engine.submit("the", processors=[lambda ids, n, logits: logits[:1]])
    with pytest.raises(UserError):
        failed.result()
    assert repr(failed).startswith("<Generation: failed, ") and "\n" not in repr(failed)
