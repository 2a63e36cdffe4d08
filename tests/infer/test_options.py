"""What may be asked of a completion beyond its length and temperature."""

import pytest
import torch


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
