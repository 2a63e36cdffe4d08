"""A text's own probability, token by token."""

import math

import pytest
import torch

from tiedgpt.errors import UserError


def logprobs(model, ids):
    table = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0]
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_a_text_is_scored_as_the_model_scores_it(engine):
    ids = engine.tokenizer.encode("the cat sat on the mat. the dog ate")
    scored = engine.score("the cat sat on the mat. the dog ate")
    assert scored.ids == ids
    expected = logprobs(engine.model, ids)
    assert scored.logprobs == pytest.approx(expected, abs=1e-4)
    assert scored.total == pytest.approx(sum(expected), abs=1e-3)
    assert scored.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)


def test_a_long_text_is_scored_in_windows_of_which_half_is_seen_again(engine):
    ids = torch.randint(250, (131,), generator=torch.Generator().manual_seed(0)).tolist()
    got = engine.score(ids).logprobs
    assert len(got) == 130
    expected = logprobs(engine.model, ids[:49])
    for start in range(24, 131, 24):
        window = ids[start : start + 49]
        expected += logprobs(engine.model, window)[len(expected) - start :]
    assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [2, 48, 49, 50, 73, 74])
def test_every_token_after_the_first_is_scored_once(engine, length):
    assert len(engine.score([3] * length).logprobs) == length - 1


def test_a_list_gives_a_list_and_one_token_is_too_little(engine):
    one, two = engine.score([[1, 2, 3], "the cat"])
    assert one == engine.score([1, 2, 3]) and two == engine.score("the cat")
    assert engine.score([]) == []
    with pytest.raises(UserError, match="one token"):
        engine.score([5])
