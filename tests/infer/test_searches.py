"""The ways to search, as keywords of `Engine.generate` and `Engine.stream`."""

import math
import re

import pytest
import torch

from tests.infer.conftest import beams
from tests.models import opinionated
from tiedgpt import Tokenizer
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine

TEXT = '{"name": "the cat", "age": 12} the dog sat on the mat, 2026-01-31. '


@pytest.fixture(scope="module")
def engine():
    tokenizer = Tokenizer.train([TEXT * 3], 300)
    return Engine(opinionated(tokenizer, 64, n_unnamed=3), tokenizer=tokenizer)


def text_of(engine, completion):
    ended = completion.finish_reason == "stop"
    return engine.tokenizer.decode(completion.ids[:-1] if ended else completion.ids)


def test_the_best_beam_is_the_completion(engine):
    prompts = ["the cat", "sat", "2026"]
    completions = engine.generate(prompts, num_beams=3, max_new_tokens=10, length_penalty=0.5)
    unnamed = range(len(engine.tokenizer), engine.runner.config.vocab_size)
    for prompt, completion in zip(prompts, completions, strict=True):
        best = beams(
            engine.runner,
            engine.tokenizer.encode(prompt),
            num_beams=3,
            max_new_tokens=10,
            length_penalty=0.5,
            logit_bias=dict.fromkeys(unnamed, -math.inf),
        )[0]
        assert completion.ids == best.ids
        assert completion.logprobs == pytest.approx(best.logprobs, abs=1e-4)
        assert completion.text == text_of(engine, completion)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"temperature": 0},
        {"num_beams": 3},
    ],
    ids=str,
)
def test_every_search_follows_the_constraint(engine, options):
    completions = engine.generate(
        ["the", "cat", "the"], regex="(cat ?|dog,){2,4}", max_new_tokens=40, **options
    )
    for completion in completions:
        assert completion.finish_reason == "stop"
        assert re.fullmatch("(cat ?|dog,){2,4}", completion.text)
        assert completion.text == text_of(engine, completion)


def test_logprobs_under_a_constraint_are_the_models_over_all_rows(engine):
    bound = engine.generate("the", regex="(cat|dog)+", seed=1, max_new_tokens=12)
    prompt = engine.tokenizer.encode("the")
    with torch.no_grad():
        logits = engine.model(torch.tensor([prompt + bound.ids]))[0]
    assert logits.shape[1] > len(engine.tokenizer)
    log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = [float(row[token]) for row, token in zip(log_p, bound.ids, strict=True)]
    assert bound.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_full_context_ends_a_search(engine):
    quiet = {"logit_bias": {engine.tokenizer.eos_token_id: -float("inf")}}
    completion = engine.generate([7] * 50, max_new_tokens=40, num_beams=3, **quiet)
    assert completion.finish_reason == "context"
    assert len(completion.ids) == 15
    with pytest.raises(UserError, match="shorten"):
        engine.generate([7] * 65, num_beams=3)


@pytest.mark.parametrize("name", ["num_beams", "n"])
def test_several_texts_cannot_be_streamed(engine, name):
    with pytest.raises(UserError, match=f"{name} must be 1 to stream, got 2"):
        engine.stream("the cat", **{name: 2})


def test_a_constraint_needs_a_tokenizer(engine):
    with pytest.raises(UserError, match="need a tokenizer"):
        Engine(engine.model).generate([1, 2], regex="a")


def test_a_sliding_context_follows_the_constraint(engine):
    completion = engine.generate(
        "the cat", regex="((cat|dog),){20,30}", context_end="slide", max_new_tokens=200, seed=1
    )
    assert completion.dropped > 0
    assert re.fullmatch("((cat|dog),){20,30}", completion.text)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {}])
def test_an_error_says_that_every_token_is_excluded(engine, options):
    nothing = dict.fromkeys(range(engine.runner.config.vocab_size), -math.inf)
    with pytest.raises(UserError, match="no token is left"):
        engine.generate("a", logit_bias=nothing, max_new_tokens=3, **options)
