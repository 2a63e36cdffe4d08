"""Several texts of one prompt: `n` of them, or the best of more."""

import numpy as np
import pytest

from tests.infer.conftest import equal
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine

PROMPT = [5, 9, 60, 31]
LONG = [n % 50 for n in range(40)]


def test_n_texts_are_those_of_the_prompt_given_n_times(backend):
    exact = backend.backend == "kernels"
    options = {"max_new_tokens": 6, "seed": 4}
    together = backend.generate(PROMPT, n=5, **options)
    separate = backend.generate([PROMPT] * 5, **options)
    equal(together, separate, exact=exact)
    assert len({tuple(completion.ids) for completion in together}) == 5
    first, second = backend.generate(["the", PROMPT], n=2, **options)
    equal(second, together[:2], exact=exact)
    assert len(first) == 2


def test_the_prompt_is_read_once(engine, reads):
    long = Engine(engine.model, tokenizer=engine.tokenizer)
    for given in ({"n": 6}, {"best_of": 6}):
        reads.clear()
        long.generate(LONG, max_new_tokens=3, seed=0, **given)
        assert sum(sum(read.values()) for read in reads) == 40 + 5 + 6 * 2


def test_a_short_prefix_is_not_waited_for(engine, reads):
    engine.generate(PROMPT, max_new_tokens=3, seed=0, n=6)
    assert sum(sum(read.values()) for read in reads) == 6 * 4 + 6 * 2, "each reads its own"


def test_the_best_is_chosen_and_a_seed_chooses_the_same(backend):
    exact = backend.backend == "kernels"
    options = {"max_new_tokens": 6, "seed": 4}
    chosen = backend.generate(PROMPT, best_of=5, **options)
    separate = backend.generate([PROMPT] * 5, **options)
    ranked = sorted(separate, key=lambda other: np.mean(other.logprobs), reverse=True)
    equal([chosen], ranked[:1], exact=exact)
    equal(backend.generate(PROMPT, best_of=5, n=3, **options), ranked[:3], exact=exact)
    one, other = backend.generate([PROMPT] * 2, best_of=5, **options)
    equal([one], [chosen], exact=exact)
    assert other.ids != chosen.ids


def test_a_list_of_prompts_gives_lists_of_n(engine):
    for prompts in ([PROMPT], [PROMPT, [1]], []):
        found = engine.generate(prompts, n=2, max_new_tokens=2)
        assert [len(group) for group in found] == [2] * len(prompts)
    assert engine.generate(PROMPT, n=1, max_new_tokens=2).ids


def test_what_a_text_fails_with_is_raised(engine):
    def broken(ids, n_prompt, logits):
        return logits * np.float32(np.nan) if len(ids) > 5 else logits

    with pytest.raises(UserError, match="not numbers"):
        engine.generate(PROMPT, processors=[broken], n=2)
