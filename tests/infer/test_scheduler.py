"""Requests that come, run and go in slots, each as if it were alone."""

from functools import partial

import pytest

from tests.infer.conftest import drain
from tiedgpt.errors import NoRoomError
from tiedgpt.infer import Engine, GenerationConfig
from tiedgpt.infer.scheduler import MIN_SHARED, PrefillBudget, Request, Scheduler
from tiedgpt.infer.scoring import score_text
from tiedgpt.infer.sequence import SequenceState, decode

PROMPTS = [[5, 6, 7], [8, 9], [10] * 30, [11, 12, 13, 14, 15], [16]]


def scheduler(engine, slots=2, capacity=48, **budget):
    session = engine.runner.session(n_slots=slots, capacity=capacity)
    return Scheduler(session, budget=PrefillBudget(**budget))


def request(engine, prompt, **options):
    text = SequenceState(
        prompt, GenerationConfig(**options), model=engine.runner.config, tokenizer=engine.tokenizer
    )
    return Request(partial(decode, sequence=text), prompt=prompt, sequence=text)


def add(running, engine, prompt, **options):
    added = request(engine, prompt, **options)
    running.add(added)
    return added


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7}])
@pytest.mark.parametrize("budget", [{}, {"alone": 4}], ids=str)
def test_requests_at_any_step_give_the_results_of_solo_runs(engine, options, budget):
    running = scheduler(engine, **budget)
    requests = []
    for prompt in PROMPTS:
        requests.append(add(running, engine, prompt, max_new_tokens=14, **options))
        running.step()
        running.step()
    drain(running)
    for prompt, added in zip(PROMPTS, requests, strict=True):
        alone = engine.generate(prompt, max_new_tokens=14, **options)
        assert (added.result.ids, added.result.text) == (alone.ids, alone.text)


def test_a_step_advances_each_running_request_by_one_token(engine):
    running = scheduler(engine)
    requests = [add(running, engine, prompt, temperature=0) for prompt in PROMPTS[:3]]
    for step in range(1, 4):
        running.step()
        assert [len(added.sequence.new_ids) for added in requests] == [step, step, 0]


def test_a_long_prompt_is_read_in_chunks_and_does_not_hold_up_the_others(engine):
    running = scheduler(engine, alone=8)
    short = add(running, engine, [1, 2], temperature=0)
    running.step()
    long = add(running, engine, [3] * 30, temperature=0)
    steps = 0
    while not long.sequence.new_ids:
        running.step()
        steps += 1
        assert len(short.sequence.new_ids) == 1 + steps
    assert steps == 4


def test_prompts_double_the_time_of_a_step_that_decodes():
    budget = PrefillBudget()
    for seconds, n_prompt, expected in (
        (9.0, 32, 32),  # no step has only decoded yet
        (2.0, 0, 32),
        (3.0, 32, 64),
        (4.0, 64, 64),
        (2.0 + 1e-9, 64, 128),  # at most twice as many
        (99.0, 128, 8),  # at least 8
        (9.0, 0, 8),  # counts as 4.0, and a fifth of it: the average is 2.4
        (3.95, 8, 12),
    ):
        budget.record(seconds, n_prompt, n_decode=2)
        assert budget.beside == expected


def test_a_long_text_that_is_scored_does_not_hold_up_a_completion(engine):
    running = scheduler(engine)
    scoring = Request(
        partial(score_text, ids=[n % 50 for n in range(2000)], n_context=1, n_tokens=50)
    )
    running.add(scoring)
    short = add(running, engine, [1, 2], max_new_tokens=8, temperature=0)
    steps = 0
    while short.result is None:
        running.step()
        steps += 1
    assert steps <= 10 and scoring.result is None


def test_prompts_of_one_call_are_read_before_any_is_decoded(engine):
    running = scheduler(engine, alone=30)
    first, second = (add(running, engine, [n] * 30, temperature=0) for n in (1, 2))
    running.step()
    running.step()
    assert [len(added.sequence.new_ids) for added in (first, second)] == [1, 1]
    running.step()
    assert [len(added.sequence.new_ids) for added in (first, second)] == [2, 2]


def test_a_prompt_in_chunks_holds_only_the_last_logits(engine):
    running = scheduler(engine, alone=4)
    add(running, engine, [1, 2], temperature=0)
    running.step()
    long = add(running, engine, [3] * 30, temperature=0)
    for _ in range(4):
        running.step()
        assert long.logits == []


def test_cancelling_frees_the_slot_at_once(engine):
    running = scheduler(engine, slots=1)
    first, second, third = (
        add(running, engine, prompt, max_new_tokens=5, temperature=0) for prompt in PROMPTS[:3]
    )
    running.step()
    running.cancel(third)
    running.cancel(first)
    running.step()
    assert len(second.sequence.new_ids) == 1
    drain(running)
    assert first.result.finish_reason == third.result.finish_reason == "cancelled"
    assert len(first.result.ids) == 1 and third.result.ids == []
    alone = engine.generate(PROMPTS[1], max_new_tokens=5, temperature=0)
    assert second.result.ids == alone.ids
    assert running.pool.free == [0]


def test_a_request_with_nan_logits_ends_alone(engine):
    def damaged(ids, n_prompt, logits):
        return logits * float("nan") if len(ids) > n_prompt else logits

    running = scheduler(engine)
    bad = add(running, engine, [1], processors=[damaged])
    good = add(running, engine, [2], max_new_tokens=4, temperature=0)
    drain(running)
    assert bad.result.finish_reason == "error" and "not numbers" in str(bad.result.error)
    assert bad.error is bad.result.error and len(bad.result.ids) == 1
    assert good.result.ids == engine.generate([2], max_new_tokens=4, temperature=0).ids


def test_a_slot_smaller_than_the_context_is_the_context(engine):
    running = scheduler(engine, capacity=16)
    options = {"temperature": 0, "max_new_tokens": 20}
    stops = add(running, engine, [1] * 10, **options)
    slides = add(running, engine, [1] * 10, context_end="slide", **options)
    drain(running)
    assert stops.result.finish_reason == "context" and len(stops.result.ids) == 7
    assert slides.result.finish_reason == "length" and slides.result.dropped > 0


def test_a_request_waits_for_another_that_reads_the_same_long_prefix(engine, reads):
    prompt = [n % 50 for n in range(MIN_SHARED + 3)]
    running = scheduler(engine, slots=3)
    first = add(running, engine, [*prompt, 1], temperature=0, max_new_tokens=4)
    second = add(running, engine, [*prompt, 2], temperature=0, max_new_tokens=4)
    other = add(running, engine, [3], temperature=0, max_new_tokens=4)
    running.step()
    assert [len(each.sequence.new_ids) for each in (first, second, other)] == [1, 0, 0]
    drain(running)
    assert sum(sum(read.values()) for read in reads) == len(prompt) + 1 + 1 + 1 + 3 * 3
    assert running.counts["reused_tokens"] == len(prompt)
    for each, last in ((first, 1), (second, 2)):
        alone = engine.generate([*prompt, last], temperature=0, max_new_tokens=4)
        assert each.result.ids == alone.ids


def test_others_run_while_a_prefix_is_read_and_its_slot_stays_reserved(engine):
    prompt = [n % 50 for n in range(MIN_SHARED + 10)]
    running = scheduler(engine, slots=3, beside=4)
    decoding = add(running, engine, [3], temperature=0)
    running.step()
    options = {"temperature": 0, "max_new_tokens": 4}
    shared = [add(running, engine, [*prompt, last], **options) for last in (1, 2)]
    behind = add(running, engine, [4], **options)
    running.step()
    assert [bool(each.slot_ids) for each in (decoding, *shared, behind)] == [
        True,
        True,
        False,
        False,
    ]
    running.cancel(decoding)
    running.step()
    assert behind.slot_ids and not shared[1].slot_ids and len(running.pool.free) == 1
    drain(running)
    assert running.counts["reused_tokens"] == len(prompt)


def test_a_long_cached_text_is_not_cut_for_a_short_match_if_another_slot_is_free(engine):
    running = scheduler(engine, slots=2)
    for prompt in ([*range(20)], [0, 1, 2, 30], [*range(21)]):
        add(running, engine, prompt, max_new_tokens=1)
        drain(running)
    assert sorted(running.pool.cached_ids) == [[*range(21)], [0, 1, 2, 30]]
    assert running.counts["reused_tokens"] == 3 + 20


def test_the_free_slot_with_the_longest_prefix_is_taken_else_the_oldest(engine, reads):
    running = scheduler(engine, slots=2)
    for prompt, n_read in (([1, 2, 3], 3), ([4, 5], 2), ([1, 2, 9], 1), ([1, 2, 9], 1), ([6], 1)):
        reads.clear()
        add(running, engine, prompt, max_new_tokens=1)
        drain(running)
        assert [sum(read.values()) for read in reads] == [n_read]
    assert sorted(running.pool.cached_ids) == [[1, 2, 9], [6]]


def test_the_slots_match_the_pools_records(engine):
    running = scheduler(engine, slots=3)
    for number, prompt in enumerate(PROMPTS * 3):
        add(running, engine, prompt, seed=number, context_end="slide", max_new_tokens=40)
    while running.running or running.waiting:
        running.step()
        assert list(map(len, running.pool.cached_ids)) == running.session.lengths
    assert sorted(running.pool.free) == [0, 1, 2]


def test_memory_is_checked_for_a_request_before_it_begins(engine, monkeypatch):
    wide = Engine(engine.model, slots=4, tokenizer=engine.tokenizer)
    position = wide.runner.session(n_slots=1, capacity=1).position_bytes
    monkeypatch.setattr("tiedgpt.infer.session.free_memory", lambda: 20 * position)
    options = {"temperature": 0, "max_new_tokens": 9}
    expected = engine.generate([5, 6], **options)
    assert wide.generate([5, 6], **options).ids == expected.ids
    with pytest.raises(NoRoomError, match="GB are free"):
        wide.generate([5] * 12, **options)
    fits, does_not = wide.generate([[5, 6], [7] * 10], **options)
    assert fits.ids == expected.ids and isinstance(does_not.error, NoRoomError)
    with pytest.raises(NoRoomError):
        wide.score([5] * 21)
    pool = scheduler(engine).pool
    for token in (1, 2):  # what a sequence has not filled is free again
        pool.release(pool.take(1, [token, 9], 19)[0])
