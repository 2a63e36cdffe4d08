import numpy as np
import pytest

from tests.infer.conftest import alone
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.infer.best_of import SharedPrompts, best_of, mean_logprob
from tiedgpt.infer.continuation import Continuation
from tiedgpt.infer.joint import Joint, Read, run
from tiedgpt.infer.request import Request
from tiedgpt.infer.torch_session import TorchRunner

PROMPT = [5, 9, 60, 31]


class Counting:
    """A runner that notes how many ids its sessions read."""

    def __init__(self, model):
        self.inner, self.config, self.read = TorchRunner(model), model.config, []

    def session(self, **room):
        session = self.inner.session(**room)
        read = session.read

        def counted(slots, ids, **how):
            self.read += map(len, ids)
            return read(slots, ids, **how)

        session.read = counted
        return session


def samples_of(runner, request, *, n):
    begun = Continuation(PROMPT, request, config=runner.config)
    return alone(runner, lambda lane: best_of(lane, begun), slots=n, capacity=24)


def test_samples_are_those_of_the_prompt_given_n_times(tiny):
    request = Request(max_new_tokens=6, seed=4)
    samples = samples_of(TorchRunner(tiny), request, n=5)
    separate = Engine(tiny).generate([PROMPT] * 5, max_new_tokens=6, seed=4)
    assert sorted(sample.ids for sample in samples) == sorted(other.ids for other in separate)
    means = [mean_logprob(sample) for sample in samples]
    assert means == sorted(means, reverse=True)
    assert len(set(means)) == 5


def test_the_prompt_is_read_once(tiny):
    runner = Counting(tiny)
    samples_of(runner, Request(max_new_tokens=3, seed=0), n=6)
    assert runner.read == [4] + [1] * 12


def test_the_best_is_chosen_and_a_seed_chooses_the_same(tiny):
    engine = Engine(tiny)
    chosen = engine.generate(PROMPT, max_new_tokens=6, seed=4, best_of=5)
    separate = engine.generate([PROMPT] * 5, max_new_tokens=6, seed=4)
    assert chosen.ids == max(separate, key=lambda other: np.mean(other.logprobs)).ids
    assert engine.generate(PROMPT, max_new_tokens=6, seed=4, best_of=5) == chosen
    one, other = engine.generate([PROMPT] * 2, max_new_tokens=6, seed=4, best_of=5)
    assert one == chosen
    assert other.ids != chosen.ids


def test_slots_that_read_alike_share_only_the_beginning(tiny):
    joint = Joint(TorchRunner(tiny).session(slots=3, capacity=9))
    lane = SharedPrompts(joint.lane(0, 3, 9))

    def read(*ids):
        return run(joint, lane.read([Read(slot, new) for slot, new in enumerate(ids)]))

    a, b, c = read([1, 2], [3], [1, 2])
    np.testing.assert_array_equal(a, c)
    assert not np.allclose(a, b)
    assert lane.lengths == [2, 1, 2]
    lane.cut(0, 1)
    after = read([4], [4], [4])
    fresh = TorchRunner(tiny).session(slots=3, capacity=9)
    expected = fresh.read([0, 1, 2], [[1, 4], [3, 4], [1, 2, 4]])
    for ours, theirs in zip(after, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_a_sample_fails_with_is_raised(tiny):
    def broken(ids, n_prompt, logits):
        return logits * np.float32(np.nan) if len(ids) > 5 else logits

    with pytest.raises(UserError, match="not numbers"):
        samples_of(TorchRunner(tiny), Request(processors=[broken]), n=2)
