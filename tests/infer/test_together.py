"""Concurrent requests, in one slot or several, give the results of solo runs."""

from collections import ChainMap

import pytest

from tests.infer.conftest import equal
from tests.infer.option_values import SAMPLING
from tiedgpt.infer import Engine

SEARCHES = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 4, "top_k": 20, "top_logprobs": 2},
    "drawn with all sampling options": {"seed": 4} | dict(ChainMap(*SAMPLING)),
    "beams": {"num_beams": 3},
    "beams that end early": {"num_beams": 3, "early_stopping": True, "length_penalty": -1.0},
    "sliding": {"seed": 4, "context_end": "slide"},
    "beams in a form": {"num_beams": 2, "regex": "(cat|dog|sat on ){2,9}"},
    "drawn in a form": {"seed": 3, "regex": "[a-z ]{12,20}"},
}
PROMPTS = ["the cat sat on the mat", "dog", [7] * 40, "dog", "the hat. the hat. the"]


@pytest.fixture(scope="module", params=[3, 8])
def crowded(request, make):
    """The same model with another number of slots."""
    return make(slots=request.param)


@pytest.mark.parametrize("search", SEARCHES)
def test_prompts_give_the_results_of_solo_runs(backend, crowded, search):
    options = {"max_new_tokens": 12, **SEARCHES[search]}
    exact = backend.backend == "kernels"
    alone = [backend.generate(prompt, **options) for prompt in PROMPTS]
    for _ in range(2):  # again, with slots that hold what was read before
        together = crowded.generate(PROMPTS, **options)
        again = together.pop(3)  # which draws anew for the prompt that came before
        equal(together, alone[:3] + alone[4:], exact=exact)
        if "seed" not in options:
            equal([again], alone[3:4], exact=exact)


def test_searches_of_every_kind_run_side_by_side(backend):
    asked = [
        (prompt, {"max_new_tokens": 12, **options})
        for options in SEARCHES.values()
        for prompt in ("the cat", "dog, the")
    ]
    running = [backend.submit(prompt, **options) for prompt, options in asked]
    together = [generation.result() for generation in running]
    alone = [backend.generate(prompt, **options) for prompt, options in asked]
    equal(together, alone, exact=backend.backend == "kernels")


@pytest.mark.parametrize(("search", "width"), [("beams", 3), ("greedy", 1)])
def test_the_weights_are_read_once_per_step_for_all_requests(engine, reads, search, width):
    quiet = {"logit_bias": {engine.tokenizer.eos_token_id: -float("inf")}}
    options = {"max_new_tokens": 9, **SEARCHES[search], **quiet}
    prompts = [[7, 8, 9], [4, 5, 6], [1, 2, 3], [3, 2, 1]]
    wide = Engine(engine.model, slots=4 * width)
    wide.generate(prompts[0], **options)
    alone = len(reads)
    reads.clear()
    wide.generate(prompts, **options)
    assert alone <= len(reads) <= alone + 3  # they may come some steps apart
    assert max(map(len, reads)) == 4 * width


def test_a_search_that_ends_leaves_its_slots_to_the_next(engine, reads):
    quiet = {"logit_bias": {engine.tokenizer.eos_token_id: -float("inf")}}
    options = {"stop": ["t", "e"], "seed": 1, "max_new_tokens": 20}
    prompts = ["a", "b", "c", "d"]
    lengths = [len(engine.generate(prompt, **options, **quiet).ids) for prompt in prompts]
    assert len(set(lengths)) > 1
    reads.clear()
    Engine(engine.model, tokenizer=engine.tokenizer, slots=4).generate(prompts, **options, **quiet)
    assert max(lengths) <= len(reads) < sum(sorted(lengths)[1:])
