import copy
import dataclasses

import numpy as np
import pytest
import torch

from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine


def greedy_without_cache(model, ids, n):
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model.eval()(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def test_greedy_with_the_cache_equals_greedy_without(engine):
    prompt = [5, 9, 200, 31]
    got = engine.generate(prompt, max_new_tokens=40, temperature=0)
    assert prompt + got.ids == greedy_without_cache(engine.model, prompt, len(got.ids))


def test_prompts_of_different_lengths_give_together_what_each_gives_alone(engine):
    prompts = ["the cat", "the", "naïve café, the dog sat on", "日"]
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_k": 20}):
        together = engine.generate(prompts, max_new_tokens=20, **options)
        alone = [engine.generate(prompt, max_new_tokens=20, **options) for prompt in prompts]
        assert [c.ids for c in together] == [c.ids for c in alone]
        in_small_groups = engine.generate(prompts, max_new_tokens=20, batch_size=2, **options)
        assert [c.ids for c in in_small_groups] == [c.ids for c in alone]


def test_sequences_leave_the_batch_at_different_times(engine):
    prompts = [[5, 6, 7], [8, 9], [10] * 40]
    completions = engine.generate(prompts, max_new_tokens=30, temperature=0)
    assert [c.finish_reason for c in completions].count("context") >= 1
    for prompt, completion in zip(prompts, completions, strict=True):
        alone = engine.generate(prompt, max_new_tokens=30, temperature=0)
        assert (completion.ids, completion.finish_reason) == (alone.ids, alone.finish_reason)


def test_a_seed_draws_the_same_text_and_the_same_prompt_again_draws_anew(engine):
    first = engine.generate("the", max_new_tokens=15, seed=1)
    assert engine.generate("the", max_new_tokens=15, seed=1) == first
    assert engine.generate("the", max_new_tokens=15, seed=2) != first
    twice = engine.generate(["the", "the"], max_new_tokens=15, seed=1)
    assert twice[0].ids == first.ids != twice[1].ids


def test_generation_leaves_the_global_random_stream_and_the_mode_alone(engine):
    engine.model.train()
    before = torch.get_rng_state()
    engine.generate("the cat", max_new_tokens=5)
    assert torch.equal(before, torch.get_rng_state())
    assert engine.model.training
    engine.model.eval()


def test_streamed_pieces_are_the_text_and_the_stream_returns_the_completion(engine):
    for seed in range(20):
        stream = engine.stream("the cat", max_new_tokens=25, seed=seed, temperature=1.5)
        pieces = []
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                completion = end.value
                break
        assert all(pieces)
        assert "".join(pieces) == completion.text
        new = [i for i in completion.ids if i != engine.tokenizer.eos_token_id]
        assert completion.text == engine.tokenizer.decode(new)


def test_a_stop_string_ends_the_text_before_it(engine):
    whole = engine.generate("the", max_new_tokens=30, seed=4)
    stop = whole.text[6:9]
    cut = engine.generate("the", max_new_tokens=30, seed=4, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


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


def test_logprobs_are_the_models_own(engine):
    completion = engine.generate([5, 6], max_new_tokens=6, temperature=2.0, top_k=5, seed=0)
    ids = torch.tensor([[5, 6, *completion.ids]])
    expected = engine.model(ids).log_softmax(-1)[0, 1:-1]
    expected = expected.gather(1, ids[0, 2:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_only_the_last_position_is_scored_when_decoding(engine, monkeypatch):
    shapes = []
    unembed = engine.model.wte.unembed
    monkeypatch.setattr(
        engine.model.wte, "unembed", lambda h: shapes.append(tuple(h.shape)) or unembed(h)
    )
    engine.generate([[1, 2, 3, 4, 5], [6, 7]], max_new_tokens=4, temperature=0)
    assert set(shapes) == {(2, 32)}


def test_a_full_context_stops_and_says_so(engine):
    completion = engine.generate([7] * 40, max_new_tokens=100, temperature=0)
    assert completion.finish_reason == "context"
    assert len(completion.ids) == 48 - 40 + 1
    full = engine.generate([7] * 48, max_new_tokens=100, temperature=0)
    assert len(full.ids) == 1 and full.finish_reason == "context"


def test_a_sliding_context_goes_on_as_if_begun_from_what_it_still_sees(engine):
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


def test_an_engine_is_made_from_a_directory(engine, tmp_path):
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    again = Engine(tmp_path)
    expected = engine.generate("the cat", max_new_tokens=9, temperature=0)
    assert again.generate("the cat", max_new_tokens=9, temperature=0) == expected


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([0] * 49, {}, "49 tokens and the model's context 48"),
        ([0, 100_000], {}, "100000 is no id"),
        ([0, -1], {}, "-1 is no id"),
        ([0, True], {}, "True is no id"),
        ([0, 1.5], {}, "1.5 is no id"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens=0"),
        ("x", {"max_new_tokens": True}, "max_new_tokens"),
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"seed": -1}, "seed"),
        ("x", {"stop": [""]}, "stop string"),
        ("x", {"context_end": "wrap"}, "wrap"),
        ("x", {"batch_size": 0}, "batch_size"),
        ("x", {"stop_ids": [1000]}, "stop_ids names 1000"),
        ("x", {"stop_ids": [True]}, "stop_ids"),
        ("x", {"logit_bias": {1000: 1.0}}, "logit_bias names 1000"),
        ("x", {"bad_words": [[1, 1000]]}, "bad_words names 1000"),
        ("x", {"top_logprobs": -1}, "top_logprobs"),
        ("x", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("x", {"speculate": "oracle"}, "oracle"),
        ("x", {"draft_tokens": 0}, "draft_tokens"),
        ([0] * 60, {"context_end": "slide", "prompt_logprobs": True}, "prompt_logprobs"),
        ("\ud800", {}, "Unicode"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(engine, prompt, options, says):
    with pytest.raises(UserError, match=says):
        engine.generate(prompt, **options)


def test_mismatched_parts_are_refused(engine, tokenizer, tmp_path):
    small = GPT(GPTConfig(vocab_size=10, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UserError, match="do not belong together"):
        Engine(small, tokenizer=tokenizer)
    with pytest.raises(UserError, match="needs a tokenizer"):
        Engine(small).generate("text")
    with pytest.raises(UserError, match="no token to start from"):
        Engine(small).generate([[]])
    with pytest.raises(UserError, match="precision"):
        Engine(small, "int3")


def test_streams_that_are_left_or_interleaved_do_not_disturb_training(engine):
    engine.model.train()
    engine.model.h[0].eval()
    expected = Engine(copy.deepcopy(engine.model).eval()).generate([5, 6], temperature=0)
    left = engine.stream([5, 6], temperature=0)
    next(left)
    assert engine.model.training and not engine.model.h[0].training
    left.close()
    assert engine.generate([5, 6], temperature=0).ids == expected.ids
    assert engine.model.training and not engine.model.h[0].training
    engine.model.eval()


def test_rows_beyond_the_tokenizer_are_never_drawn(tokenizer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=400, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    completion = Engine(GPT(config), tokenizer=tokenizer).generate([1], max_new_tokens=15, seed=0)
    assert max(completion.ids) < len(tokenizer) < 400


def test_damaged_weights_are_said_to_be(engine):
    broken = copy.deepcopy(engine.model)
    with torch.no_grad():
        broken.ln_f.weight[0] = float("nan")
    with pytest.raises(UserError, match="not numbers"):
        Engine(broken).generate([1, 2])


def test_ids_may_come_as_arrays_and_tensors(engine):
    expected = engine.generate([5, 6, 7], max_new_tokens=3, temperature=0)
    for ids in (np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
        assert engine.generate(ids, max_new_tokens=3, temperature=0) == expected
        assert engine.generate([ids], max_new_tokens=3, temperature=0) == [expected]


def test_no_prompts_give_no_completions(engine):
    assert engine.generate([]) == []


def test_more_prompts_than_slots_take_them_in_turn(engine):
    prompts = [[n] for n in range(7)]
    together = engine.generate(prompts, batch_size=3, max_new_tokens=5, temperature=0)
    assert [c.ids for c in together] == [
        engine.generate(prompt, max_new_tokens=5, temperature=0).ids for prompt in prompts
    ]


def test_what_is_neither_a_model_nor_a_source_is_refused():
    with pytest.raises(UserError, match="neither a GPT"):
        Engine(3)
