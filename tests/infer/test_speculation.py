"""Drafts change how fast a text comes, and never the text."""

import random
from copy import deepcopy

import pytest

from tests.infer.conftest import equal
from tests.infer.test_scheduler import add
from tiedgpt.infer import Engine
from tiedgpt.infer.scheduler import Scheduler
from tiedgpt.infer.speculation import Drafter, Price


@pytest.fixture
def free_drafts(monkeypatch):
    """Drafts cost nothing, whatever the clock says: as many as can be are read."""
    monkeypatch.setattr(Price, "of", lambda *_: 0.0)
    monkeypatch.setattr("tiedgpt.infer.speculation.LEAST", -1.0)


@pytest.fixture
def exact(backend):
    """Torch in float64: in float32 a draw at the border of two tokens goes by how many are read."""
    if backend.backend == "kernels":
        return backend
    return Engine(deepcopy(backend.model).double(), tokenizer=backend.tokenizer)


def grown(drafter, ids, tokens, price=0.05):
    """Let a text grow by `tokens`; return what was drafted at each, for a price a token."""
    drafts = []
    for token in tokens:
        drafts.append(drafter.draft(ids, price=lambda n: price * n, room=8))
        ids.append(token)
    return drafts


def test_what_repeats_is_drafted_once_a_guess_has_come_true():
    run = list(range(20, 40))
    ids = [1, 2, *run, 3, 20, 21]
    drafts = grown(Drafter(10), ids, run[2:])
    assert drafts[0] == [], "nothing is known yet of how good guesses are"
    longest = max(drafts, key=len)
    assert len(longest) >= 3
    for at, draft in enumerate(drafts):
        assert draft == [*run[2:], 3, 20, 21, 22, 23, 24, 25][at : at + len(draft)]


def test_a_loop_is_drafted_round_and_round():
    drafter, ids = Drafter(10), [1, 2, 3] * 4
    assert grown(drafter, ids, [1, 2, 3] * 4)[-1][:4] == [3, 1, 2, 3]


def test_text_that_does_not_repeat_is_hardly_ever_drafted():
    dice = random.Random(0)
    drafter, ids = Drafter(10), [dice.randrange(40) for _ in range(200)]
    drafts = grown(drafter, ids, [dice.randrange(40) for _ in range(1000)])
    assert sum(map(bool, drafts)) <= 10


def test_what_costs_more_than_it_gains_is_not_drafted():
    ids = [1, 2, 3] * 4
    assert not any(grown(Drafter(10), ids, [1, 2, 3] * 10, price=1.0))


def test_a_draft_is_as_long_as_pays():
    steps = [0.1, 0.2, 0.3, 3.1, 3.2, 3.3, 3.4, 3.5]  # a product for four rows, and a slower one
    ids = [1, 2, 3] * 8
    drafter = Drafter(8)
    grown(drafter, ids, [1, 2, 3] * 8)
    assert len(drafter.draft(ids, price=lambda n: steps[n - 1], room=8)) == 3
    assert len(drafter.draft(ids, price=lambda n: 0.1, room=8)) == 8


def test_a_price_is_learnt_from_the_clock_and_forgotten_in_time():
    price = Price()
    for _ in range(20):
        price.note_plain(1.0, sequences=4)
        price.note_drafted(3.0, sequences=4, drafts=[6, 2])
    assert price.of(6) == pytest.approx(6, rel=0.05)
    assert price.of(2) == pytest.approx(2, rel=0.05)
    assert price.of(4) == pytest.approx(4, rel=0.05)
    assert 6 < price.of(12) < 12
    for _ in range(5000):
        price.note_plain(1.0, sequences=4)
    assert price.of(6) < 0.1


def test_one_step_that_was_held_up_does_not_end_drafts():
    price = Price()
    for _ in range(20):
        price.note_plain(1.0, sequences=1)
        price.note_drafted(1.2, sequences=1, drafts=[4])
    price.note_drafted(60.0, sequences=1, drafts=[4])
    assert price.of(4) < 1


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("context_end", ["stop", "slide"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"seed": 3, "temperature": 0.3},
        {"seed": 3, "top_k": 3, "frequency_penalty": 0.1},
        {"temperature": 0, "stop": "th", "repetition_penalty": 1.1},
    ],
)
def test_drafts_never_change_the_text(exact, options, context_end):
    prompts = [[1, 2, 3] * 5, [9], "the cat sat on the mat. the cat sat", [7] * 30]
    options |= {"max_new_tokens": 60, "context_end": context_end}
    plain = exact.generate(prompts, **options)
    drafted = exact.generate(prompts, speculate="ngram", **options)
    equal(drafted, plain, exact=exact.backend == "kernels")


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("draft_tokens", [1, 4, 10])
def test_text_that_repeats_itself_takes_fewer_steps(engine, draft_tokens):
    bias = {1: 60.0}  # a text of one token
    session = engine.runner.session(n_slots=1, capacity=48)
    scheduler = Scheduler(session)
    request = add(
        scheduler, engine, [1] * 5, max_new_tokens=40, temperature=0, logit_bias=bias,
        speculate="ngram", draft_tokens=draft_tokens,
    )  # fmt: skip
    steps = 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        steps += 1
    assert request.result.ids == [1] * 40
    assert scheduler.counts["accepted_tokens"] >= 40 - steps
    assert steps <= 40 / (1 + 0.6 * draft_tokens) + 4


COSTS = {
    "one read of the weights": lambda n: 1 + 0.05 * (n - 1),
    "another product for more than a row": lambda n: 1.0 if n == 1 else 2.0,
    "as many reads as tokens": float,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("share_copied", [0, 0.05, 0.2, 1])
@pytest.mark.parametrize("vocabulary", [8, 1000])
def test_drafts_never_cost_more_than_three_percent(cost, share_copied, vocabulary):
    """A text of 1,000 tokens, a share of it copied in short runs, on a clock of the test's own."""
    dice, drafter, price = random.Random(1), Drafter(10), Price()
    ids = [dice.randrange(vocabulary) for _ in range(300)]
    text: list[int] = []
    while len(text) < 1000:
        start = dice.randrange(290)
        copied = ids[start : start + dice.randint(2, 8)]
        text += copied if dice.random() < share_copied else [dice.randrange(vocabulary)]
    spent, at = 0.0, 0
    while at < len(text):
        draft = drafter.draft(ids, price=price.of, room=len(text) - at - 1)
        agreed = 0
        while agreed < len(draft) and draft[agreed] == text[at + agreed]:
            agreed += 1
        seconds = COSTS[cost](1 + len(draft))
        spent += seconds
        if draft:
            price.note_drafted(seconds, sequences=1, drafts=[len(draft)])
        else:
            price.note_plain(seconds, sequences=1)
        ids += text[at : at + agreed + 1]
        at += agreed + 1
    assert spent <= 1.03 * len(text)
    if share_copied == 1 and vocabulary == 1000 and cost != "as many reads as tokens":
        assert spent < 0.95 * len(text)
