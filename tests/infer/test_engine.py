import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.infer.conftest import equal
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine, GenerationConfig


def greedy_without_cache(model, ids, n):
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model.eval()(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def test_greedy_with_the_cache_equals_greedy_without(engine):
    prompt = [5, 9, 200, 31]
    got = engine.generate(prompt, max_new_tokens=40, temperature=0)
    assert prompt + got.ids == greedy_without_cache(engine.model, prompt, len(got.ids))


def test_a_seed_repeats_the_text_and_no_seed_draws_a_new_one(engine):
    first = engine.generate("the", max_new_tokens=15, seed=1)
    assert engine.generate("the", max_new_tokens=15, seed=1) == first
    assert engine.generate("the", max_new_tokens=15, seed=2) != first
    twice = engine.generate(["the", "the"], max_new_tokens=15, seed=1)
    assert twice[0].ids == first.ids != twice[1].ids


def test_xtc_excludes_the_likeliest_tokens_of_a_seeded_text_except_its_ends(backend):
    tokenizer, threshold = backend.tokenizer, 0.02
    spared = {tokenizer.eos_token_id, *tokenizer.encode("\n")}
    options = {"max_new_tokens": 30, "seed": 1, "xtc_threshold": threshold, "top_logprobs": 50}
    text = backend.generate("the", xtc_probability=1, **options)
    assert backend.generate("the", xtc_probability=1, **options) == text
    assert backend.generate("the", xtc_probability=0, **options).ids != text.ids
    n_excluding = 0
    for token, likeliest in zip(text.ids, text.top_logprobs, strict=True):
        top_choices = [id for id, logprob in likeliest if logprob >= math.log(threshold)]
        if len(top_choices) > 1 and not spared & {*top_choices[:-1]}:
            assert token not in top_choices[:-1]
            n_excluding += 1
    assert n_excluding > 9


def test_generation_leaves_the_global_random_stream_and_the_mode_alone(engine):
    engine.model.train()
    before = torch.get_rng_state()
    engine.generate("the cat", max_new_tokens=5)
    assert torch.equal(before, torch.get_rng_state())
    assert engine.model.training
    engine.model.eval()


def test_the_end_of_text_ends_the_completion(engine):
    model = engine.model
    prompt = [3, 4]
    second = greedy_without_cache(model, prompt, 2)[-1]
    ending = Engine(model)
    ending.model.config = dataclasses.replace(model.config, eos_token_id=second)
    try:
        completion = ending.generate(prompt, max_new_tokens=9, temperature=0)
    finally:
        ending.model.config = dataclasses.replace(
            model.config, eos_token_id=engine.tokenizer.eos_token_id
        )
    assert completion.ids[-1] == second and completion.finish_reason == "stop"
    assert completion.text == ""


def test_logprobs_equal_the_models(engine):
    completion = engine.generate([5, 6], max_new_tokens=6, temperature=2.0, top_k=5, seed=0)
    ids = torch.tensor([[5, 6, *completion.ids]])
    expected = engine.model(ids).log_softmax(-1)[0, 1:-1]
    expected = expected.gather(1, ids[0, 2:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert completion.mean_logprob == pytest.approx(expected.mean().item(), abs=1e-4)


def test_only_the_last_position_is_scored_when_decoding(engine, monkeypatch):
    shapes = []
    unembed = engine.model.wte.unembed
    monkeypatch.setattr(
        engine.model.wte, "unembed", lambda h: shapes.append(tuple(h.shape)) or unembed(h)
    )
    engine.generate([[1, 2, 3, 4, 5], [6, 7]], max_new_tokens=4, temperature=0)
    assert sum(rows for rows, _ in shapes) == 2 * 4, "a row for each token of each text"


def test_a_full_context_stops_with_its_finish_reason(engine):
    completion = engine.generate([7] * 40, max_new_tokens=100, temperature=0)
    assert completion.finish_reason == "context"
    assert len(completion.ids) == 48 - 40 + 1
    full = engine.generate([7] * 48, max_new_tokens=100, temperature=0)
    assert len(full.ids) == 1 and full.finish_reason == "context"


def test_a_sliding_context_continues_as_from_the_tokens_it_still_sees(engine):
    completion = engine.generate([7] * 40, max_new_tokens=30, temperature=0, context_end="slide")
    assert len(completion.ids) == 30 and completion.finish_reason == "length"
    ids = [7] * 40 + completion.ids
    assert completion.dropped == 49 - 24
    window = ids[completion.dropped : 49]
    assert greedy_without_cache(engine.model, window, 21)[24:] == ids[49:]
    long_prompt = engine.generate([7] * 60, max_new_tokens=3, temperature=0, context_end="slide")
    assert long_prompt.dropped == 60 - 24


def test_an_empty_prompt_starts_from_the_beginning_of_text(engine):
    start = engine.model.config.bos_token_id
    empty = engine.generate("", max_new_tokens=8, temperature=0)
    assert empty.ids == engine.generate([start], max_new_tokens=8, temperature=0).ids


def test_other_precisions_copy_the_model(engine):
    rounded = Engine(engine.model, "bf16", tokenizer=engine.tokenizer)
    assert rounded.model.wte.weight.dtype == torch.bfloat16
    assert engine.model.wte.weight.dtype == torch.float32
    assert rounded.generate("the cat", max_new_tokens=4, temperature=0).ids


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([0] * 49, {}, "49 tokens and the model's context 48"),
        ([0, 100_000], {}, "100000 is no id"),
        ([0, -1], {}, "-1 is no id"),
        ([0, True], {}, "True is no id"),
        ([0, 1.5], {}, "1.5 is no id"),
        ("x", {"num_beams": 9}, r"takes 9 slots and the engine has 8: .*slots=9"),
        *(
            (odd, {}, "neither a text nor ids")
            for odd in (b"x", None, 5, {"input_ids": [5]}, {5}, np.array(5))
        ),
        ([b"x"], {}, "must be text or ids"),
        ([None], {}, "must be text or ids"),
        ([["the cat"]], {}, "got a list of prompts, which generate takes"),
        ([True], {}, "must be text or ids"),
        ([0] * 60, {"context_end": "slide", "prompt_logprobs": True}, "prompt_logprobs"),
        ("\ud800", {}, "Unicode"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(engine, prompt, options, says):
    with pytest.raises(UserError, match=says):
        engine.generate(prompt, **options)


@pytest.mark.parametrize(
    ("prompts", "says"), [(["the cat", "the dog"], "which generate takes"), (None, "text or ids")]
)
def test_streams_take_one_prompt(engine, prompts, says):
    for ask in (engine.stream, engine.submit):
        with pytest.raises(UserError, match=says):
            ask(prompts)


def test_mismatched_parts_are_refused(engine, tokenizer, tmp_path):
    small = GPT(GPTConfig(vocab_size=10, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UserError, match="do not belong together"):
        Engine(small, tokenizer=tokenizer)
    with pytest.raises(UserError, match="needs a tokenizer"):
        Engine(small).generate("text")
    with pytest.raises(UserError, match="no token that texts begin with"):
        Engine(small).generate([[]])
    with pytest.raises(UserError, match="precision"):
        Engine(small, "int3")
    with pytest.raises(UserError, match="neither a GPT"):
        Engine(3)


def test_rows_beyond_the_tokenizer_are_never_drawn(tokenizer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=400, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    completion = Engine(GPT(config), tokenizer=tokenizer).generate([1], max_new_tokens=15, seed=0)
    assert max(completion.ids) < len(tokenizer) < 400


def test_ids_may_be_arrays_and_tensors(engine):
    expected = engine.generate([5, 6, 7], max_new_tokens=3, temperature=0)
    for ids in (np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
        assert engine.generate(ids, max_new_tokens=3, temperature=0) == expected
        assert engine.generate([ids], max_new_tokens=3, temperature=0) == [expected]
        rows = engine.generate(ids[:, None], max_new_tokens=3, temperature=0)
        equal(rows, engine.generate([[5], [6], [7]], max_new_tokens=3, temperature=0), exact=False)


def test_no_prompts_give_no_completions(engine):
    assert engine.generate([]) == engine.generate([], num_beams=2) == []


def test_keywords_override_a_config(engine):
    config = GenerationConfig(max_new_tokens=5, temperature=0)
    expected = engine.generate("the", max_new_tokens=5, temperature=0)
    assert engine.generate("the", config) == expected
    assert engine.generate("the", config, seed=None, stop=None) == expected
    assert len(engine.generate("the", config, max_new_tokens=2).ids) == 2
    with pytest.raises(UserError, match="must be a GenerationConfig, got dict"):
        engine.generate("the", {"max_new_tokens": 5})
    drawn = engine.generate("the", seed=np.int64(3), max_new_tokens=5)
    assert drawn == engine.generate("the", seed=3, max_new_tokens=5)


def test_a_cached_prefix_is_not_read_again_and_the_text_is_the_same(make, backend):
    prompt = [n % 50 for n in range(30)]
    options = {"max_new_tokens": 10, "seed": 1, "top_logprobs": 2}
    for search in ({}, {"num_beams": 3, "seed": None, "top_logprobs": 0}):
        cold = make().generate([*prompt, 7], **options | search)
        warm, exact = make(), backend.backend == "kernels"
        quiet = {warm.tokenizer.eos_token_id: -math.inf}
        busy = warm.stream(  # a model that was given forgets when nothing runs
            [40], max_new_tokens=10**6, context_end="slide", logit_bias=quiet
        )
        next(busy)
        warm.generate(prompt, max_new_tokens=2, temperature=0)
        before = warm.stats()
        equal([warm.generate([*prompt, 7], **options | search)], [cold], exact=exact)
        busy.cancel()
        assert warm.stats()["prompt_tokens"] - before["prompt_tokens"] == 31
        assert warm.stats()["reused_tokens"] - before["reused_tokens"] == 30
    assert before["reused_tokens"] == 0


def test_a_conversation_reads_only_its_new_tokens(make, backend):
    if backend.backend == "torch":
        pytest.skip("a model that was given may change: nothing is kept between requests")
    chat, ids = make(slots=2), [3, 4, 5]
    for turn in range(4):
        completion = chat.generate(ids, max_new_tokens=5, seed=turn)
        assert completion == backend.generate(ids, max_new_tokens=5, seed=turn)
        ids = [*ids, *completion.ids, 9]
        told = chat.stats()
    assert told["requests"] == 4 and told["generated_tokens"] == 20
    assert told["prompt_tokens"] == 3 + 9 + 15 + 21
    assert told["reused_tokens"] == 0 + 7 + 13 + 19
    assert told["seconds"] > 0 and told["running"] == told["waiting"] == 0


def test_a_model_trained_between_requests_is_read_again(engine):
    model = copy.deepcopy(engine.model)
    changing = Engine(model)
    prompt = [n % 50 for n in range(40)]
    changing.generate(prompt, max_new_tokens=3, temperature=0)
    with torch.no_grad():
        model.wte.weight.normal_()
    expected = Engine(model).generate(prompt, max_new_tokens=3, temperature=0)
    assert changing.generate(prompt, max_new_tokens=3, temperature=0) == expected


def test_stats_count_generated_tokens(engine):
    counted = Engine(engine.model)
    counted.generate([1] * 5, max_new_tokens=40, temperature=0, logit_bias={1: 60.0})
    assert counted.stats()["generated_tokens"] == 40
    best = counted.generate([5], num_beams=3, max_new_tokens=7)
    assert counted.stats()["generated_tokens"] == 40 + len(best.ids)


def test_an_engine_describes_itself(backend):
    said = repr(backend)
    assert "8 slots of 48 positions" in said
    assert ("torch" if backend.backend == "torch" else "kernels") in said
