"""Searches side by side give what each gives alone, for fewer reads of the weights."""

import pytest

STRATEGIES = {
    "beams": {"num_beams": 3},
    "beams that end early": {"num_beams": 3, "early_stopping": True, "length_penalty": -1.0},
    "best of three": {"best_of": 3, "seed": 4},
    "guided": {"guidance_scale": 1.5, "seed": 4},
    "guided away from much": {"guidance_scale": 2.0, "negative_prompt": [3] * 9, "seed": 4},
    "guided, with drafts": {"guidance_scale": 1.5, "temperature": 0, "speculate": "ngram"},
    "guided, with the prompt scored": {"guidance_scale": 1.5, "seed": 4, "prompt_logprobs": True},
    "guided beams": {"guidance_scale": 1.5, "num_beams": 2},
    "the best of guided ones": {"guidance_scale": 1.5, "best_of": 2, "seed": 4},
    "one of several that slide": {"best_of": 2, "seed": 4, "context_end": "slide"},
    "beams in a form": {"num_beams": 2, "regex": "(cat|dog|sat on ){2,9}"},
}
PROMPTS = ["the cat sat on the mat", "dog", [7] * 40, "dog", "the hat. the hat. the"]


@pytest.fixture
def reads(monkeypatch, engine):
    """The slots of every read of a session, and sessions' slots."""
    noted = {"slots": [], "read": []}
    session = engine.runner.session

    def counting(**room):
        made = session(**room)
        noted["slots"].append(made.slots)
        read = made.read

        def counted(slots, ids, **how):
            noted["read"].append(list(slots))
            return read(slots, ids, **how)

        made.read = counted
        return made

    monkeypatch.setattr(engine.runner, "session", counting)
    return noted


@pytest.mark.parametrize("batch_size", [8, 13])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prompts_give_together_what_each_gives_alone(backend, strategy, batch_size):
    options = {"max_new_tokens": 12, **STRATEGIES[strategy]}
    together = backend.generate(PROMPTS, batch_size=batch_size, **options)
    one_by_one = backend.generate(PROMPTS, batch_size=1, **options)
    if backend.backend == "kernels":
        assert together == one_by_one
    for number, (a, b) in enumerate(zip(together, one_by_one, strict=True)):
        assert (a.ids, a.text, a.finish_reason) == (b.ids, b.text, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.prompt_logprobs == pytest.approx(b.prompt_logprobs, abs=1e-4)
        if number != 3:  # which draws anew for the prompt that came before
            assert a.ids == backend.generate(PROMPTS[number], **options).ids


@pytest.mark.parametrize(("strategy", "width"), [("beams", 3), ("best of three", 3), ("guided", 2)])
def test_the_weights_are_read_once_a_step_for_all(engine, reads, strategy, width):
    quiet = {"logit_bias": {engine.tokenizer.eos_token_id: -float("inf")}}
    options = {"max_new_tokens": 9, **STRATEGIES[strategy], **quiet}
    prompts = [[7, 8, 9], [4, 5, 6], [1, 2, 3], [3, 2, 1]]
    engine.generate(prompts[0], **options)
    alone = len(reads["read"])
    reads["read"].clear()
    engine.generate(prompts, batch_size=4 * width, **options)
    assert len(reads["read"]) == alone
    assert max(map(len, reads["read"])) == 4 * width
    assert reads["slots"] == [width, 4 * width]


def test_as_many_searches_run_as_there_are_slots_for_and_at_least_one(engine, reads):
    for batch_size in (1, 5, 6, 11, 100):
        engine.generate(PROMPTS, batch_size=batch_size, num_beams=3, max_new_tokens=3)
    assert reads["slots"] == [3, 3, 6, 9, 15]


def test_a_search_that_ends_leaves_its_slots_to_the_next(engine, reads):
    quiet = {"logit_bias": {engine.tokenizer.eos_token_id: -float("inf")}}
    options = {"guidance_scale": 1.5, "stop": ["t", "e"], "seed": 1, "max_new_tokens": 20}
    lengths = [
        len(engine.generate(prompt, **options, **quiet).ids) for prompt in ("a", "b", "c", "d")
    ]
    assert len(set(lengths)) > 1
    reads["read"].clear()
    engine.generate(["a", "b", "c", "d"], batch_size=4, **options, **quiet)
    assert max(lengths) <= len(reads["read"]) < sum(sorted(lengths)[1:])
