"""A tokenizer, and an engine on random weights strong enough to have opinions."""

from functools import partial

import pytest

from tests.models import TEXT, opinionated
from tiedgpt import Tokenizer
from tiedgpt.infer import Engine, GenerationConfig
from tiedgpt.infer.beam import beam_search
from tiedgpt.infer.scheduler import Request, Scheduler
from tiedgpt.infer.sequence import SequenceState
from tiedgpt.infer.torch_session import TorchSession
from tiedgpt.weights.formats.packed.writer import pack_gpt, save_packed


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train([TEXT], 300)


@pytest.fixture(scope="package")
def engine(tokenizer):
    return Engine(opinionated(tokenizer), tokenizer=tokenizer)


@pytest.fixture(scope="package", params=["torch", "fp32", "int8"])
def make(request, engine):
    """Makes engines on torch and on the kernels, whose logits no neighbour changes by a bit."""
    kernels = {"precision": request.param, "backend": "kernels"}
    how = {} if request.param == "torch" else kernels
    return partial(Engine, engine.model, tokenizer=engine.tokenizer, **how)


@pytest.fixture(scope="package")
def backend(make):
    """The engine on torch and on the kernels."""
    return make()


@pytest.fixture
def packed(engine, tmp_path):
    """A packed directory of the engine's model in int8."""
    save_packed(pack_gpt(engine.model, "int8"), tmp_path / "packed")
    engine.tokenizer.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def reads(monkeypatch):
    """The slots and the numbers of ids of every read of torch's sessions, as dictionaries."""
    noted, read = [], TorchSession.read

    def counted(session, slots, ids, **how):
        noted.append(dict(zip(slots, map(len, ids), strict=True)))
        return read(session, slots, ids, **how)

    monkeypatch.setattr(TorchSession, "read", counted)
    return noted


def drain(scheduler):
    """Run a scheduler's requests to their ends."""
    while scheduler.running or scheduler.waiting:
        scheduler.step()


def beams(runner, prompt, **options):
    """Beams found by the search."""
    sequence = SequenceState(prompt, GenerationConfig(**options), model=runner.config)
    n_slots = sequence.config.num_beams
    session = runner.session(n_slots=n_slots, capacity=runner.config.n_positions)
    scheduler = Scheduler(session)
    search = Request(partial(beam_search, sequence=sequence), n_slots=n_slots)
    scheduler.add(search)
    drain(scheduler)
    assert search.error is None
    return search.result


def equal(ours, theirs, *, exact):
    """Require completions to be the same: to the bit, or as far as torch rounds alike."""
    if exact:
        assert ours == theirs
        return
    for a, b in zip(ours, theirs, strict=True):
        assert (a.ids, a.text, a.finish_reason, a.dropped) == (
            b.ids, b.text, b.finish_reason, b.dropped,
        )  # fmt: skip
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.prompt_logprobs == pytest.approx(b.prompt_logprobs, abs=1e-4)
