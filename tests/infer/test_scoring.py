"""A text's own probability, token by token."""

import math

import pytest
import torch

from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine


def logprobs(model, ids):
    table = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0]
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_scores_of_a_text_equal_the_models(engine):
    ids = engine.tokenizer.encode("the cat sat on the mat. the dog ate")
    scored = engine.score("the cat sat on the mat. the dog ate")
    assert scored.ids == ids
    expected = logprobs(engine.model, ids)
    assert scored.logprobs == pytest.approx(expected, abs=1e-4)
    assert scored.total == pytest.approx(sum(expected), abs=1e-3)
    assert scored.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)


def test_a_long_text_is_scored_in_half_overlapping_windows(engine):
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


def test_a_list_gives_a_list_and_one_token_is_refused(backend):
    texts = [[1, 2, 3], "the cat", list(range(100))]
    for together, text in zip(backend.score(texts), texts, strict=True):
        alone = backend.score(text)
        assert (together.ids, together.ranks) == (alone.ids, alone.ranks)
        if backend.backend == "kernels":
            assert together == alone
        assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert backend.score([]) == []
    with pytest.raises(UserError, match="one token"):
        backend.score([5])


CONTEXTS = [
    ("the dog", " ate the hat"),
    ("the dog ", "ate the hat"),
    ("the dog", ""),
    ("", "the dog"),
    ([5, 6], [7, 8, 9]),
    ([5, 6], "the dog"),
    ([7] * 60, [3, 4]),
]


@pytest.mark.parametrize(("context", "text"), CONTEXTS, ids=str)
def test_a_text_is_scored_after_its_context(engine, context, text):
    if not text:
        with pytest.raises(UserError, match="after its context"):
            engine.score(text, context)
        return
    encode, start = engine.tokenizer.encode, engine.runner.config.bos_token_id
    if isinstance(context, str):
        ids = encode(context + text) if context else [start, *encode(text)]
        given = encode(context.rstrip()) if context else [start]
    else:
        given, ids = context, context + (encode(text) if isinstance(text, str) else text)
    assert ids[: len(given)] == given
    scored = engine.score(text, context)
    assert scored.ids == ids and scored.n_context == len(given)
    seen = ids[-48:]
    if len(ids) > 48:  # the context is longer than the window: half a window of it is seen
        seen = ids[len(given) - 24 :]
    n = len(ids) - len(given)
    assert scored.logprobs == pytest.approx(logprobs(engine.model, seen)[-n:], abs=1e-4)
    rows = engine.model(torch.tensor([seen[:-1]]))[0, -n:]
    above = rows > rows.gather(1, torch.tensor(seen[-n:])[:, None])
    assert scored.ranks == (1 + above.sum(-1)).tolist()
    assert scored.is_greedy == (not above.any())


def test_greedy_text_is_greedy(backend):
    text = backend.generate([5, 6], max_new_tokens=9, temperature=0).ids
    scored = backend.score(text, [5, 6])
    assert scored.is_greedy and scored.ranks == [1] * len(text)
    other = backend.score([*text[:-1], text[-1] ^ 1], [5, 6])
    assert not other.is_greedy and other.ranks[:-1] == [1] * (len(text) - 1)


def test_a_context_is_read_once_for_many_texts(engine, reads):
    context, texts = [n % 50 for n in range(40)], [[1, 2], [3], [4, 5, 6]]
    alone = [engine.score(text, context) for text in texts]
    reads.clear()
    together = engine.score(texts, [context] * 3)
    assert sum(sum(read.values()) for read in reads) == 39 + 2 + 1 + 3
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_contexts_are_one_for_each_text(engine):
    with pytest.raises(UserError, match="one for each text, got 1 of 2"):
        engine.score(["a", "b"], ["c"])


def test_prompt_logprobs_are_the_scores_of_the_prompt_over_all_rows(tokenizer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=400, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    engine = Engine(GPT(config).eval(), tokenizer=tokenizer)
    prompt = [5, 6, 7, 8, 9]
    scored = engine.score(prompt)
    completion = engine.generate(prompt, prompt_logprobs=True, max_new_tokens=3, temperature=0)
    assert completion.prompt_logprobs == pytest.approx(scored.logprobs, abs=1e-5)
    assert scored.logprobs == pytest.approx(logprobs(engine.model, prompt), abs=1e-4)
    for options in ({"temperature": 0}, {"num_beams": 3}):
        completion = engine.generate(prompt, max_new_tokens=3, **options)
        expected = engine.score(completion.ids, prompt).logprobs
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_rows_without_a_token_outrank_no_token(tokenizer, make):
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=len(tokenizer) + 30, n_positions=16, n_embd=32, n_layer=1, n_head=2
    )
    model = GPT(config).eval()
    with torch.no_grad():
        model.wte.weight[len(tokenizer) :] *= 50
    scoring = Engine(model, *make.args[1:], **{**make.keywords, "tokenizer": tokenizer})
    prompt = [5, 6]
    with torch.no_grad():
        logits = model.logits(model.body(torch.tensor([prompt])))[0, -1]
    likeliest = int(logits[: len(tokenizer)].argmax())
    assert logits.argmax() >= len(tokenizer)
    scored = scoring.score([likeliest], prompt)
    assert scored.is_greedy and scored.ranks == [1]
    assert scored.logprobs == pytest.approx([float(logits.log_softmax(0)[likeliest])], rel=0.05)
    assert scoring.generate(prompt, max_new_tokens=1, temperature=0).ids == [likeliest]
