"""Sequences that come, run and go in slots, each as if it were alone."""

import copy

import pytest
import torch

from tiedgpt.errors import UserError
from tiedgpt.infer import Request, Scheduler

PROMPTS = [[5, 6, 7], [8, 9], [10] * 30, [11, 12, 13, 14, 15], [16]]


def scheduler(engine, slots=2, capacity=48, **options):
    session = engine.runner.session(slots=slots, capacity=capacity)
    return Scheduler(session, tokenizer=engine.tokenizer, **options)


def drain(running):
    while running.busy:
        running.step()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7}])
@pytest.mark.parametrize("chunk", [None, 4])
def test_sequences_that_come_at_any_step_give_what_they_give_alone(engine, options, chunk):
    request = Request(max_new_tokens=14, **options)
    running = scheduler(engine, prefill_chunk=chunk)
    sequences = []
    for prompt in PROMPTS:
        sequences.append(running.add(prompt, request))
        running.step()
        running.step()
    drain(running)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        alone = engine.generate(prompt, max_new_tokens=14, **options)
        assert sequence.completion().ids == alone.ids
        assert sequence.completion().text == alone.text


def test_a_step_advances_each_running_sequence_by_one_token(engine):
    running = scheduler(engine)
    sequences = [running.add(prompt, Request(temperature=0)) for prompt in PROMPTS[:3]]
    for step in range(1, 4):
        advanced = [sequence for sequence, _ in running.step()]
        assert advanced == sequences[:2]
        assert [len(sequence.new_ids) for sequence in sequences] == [step, step, 0]


def test_a_long_prompt_in_chunks_does_not_hold_up_the_others(engine):
    running = scheduler(engine, prefill_chunk=8)
    short = running.add([1, 2], Request(temperature=0))
    running.step()
    long = running.add([3] * 30, Request(temperature=0))
    for _ in range(3):
        assert [sequence for sequence, _ in running.step()] == [short]
    assert [sequence for sequence, _ in running.step()] == [short, long]


def test_cancelling_frees_the_slot_at_once(engine):
    running = scheduler(engine, slots=1)
    request = Request(max_new_tokens=5, temperature=0)
    first, second, third = (running.add(prompt, request) for prompt in PROMPTS[:3])
    running.step()
    running.cancel(third)
    running.cancel(first)
    assert [sequence for sequence, _ in running.step()] == [second]
    drain(running)
    assert first.finish_reason == third.finish_reason == "cancelled"
    assert len(first.new_ids) == 1 and third.new_ids == []
    assert (
        second.completion().ids == engine.generate(PROMPTS[1], max_new_tokens=5, temperature=0).ids
    )


def test_one_sequence_whose_scores_are_no_numbers_ends_alone(engine):
    def damaged(ids, n_prompt, logits):
        return logits * float("nan") if len(ids) > n_prompt else logits

    running = scheduler(engine)
    bad = running.add([1], Request(processors=[damaged]))
    good = running.add([2], Request(max_new_tokens=4, temperature=0))
    drain(running)
    assert bad.finish_reason == "error" and "not numbers" in str(bad.error)
    assert good.finish_reason in ("length", "stop")


def test_requests_that_cannot_be_met_are_refused_when_they_are_added(engine):
    running = scheduler(engine, capacity=16)
    with pytest.raises(UserError, match="17 tokens and the model's context 16"):
        running.add([1] * 17, Request())
    with pytest.raises(UserError, match=r"Engine\.score"):
        running.add([1] * 17, Request(context_end="slide", prompt_logprobs=True))
    with pytest.raises(UserError, match="stop_ids names 1000"):
        running.add([1], Request(stop_ids=[1000]))
    for prompt in ([], [1, 1000], [-1]):
        with pytest.raises(UserError, match="at least one id of a vocabulary"):
            running.add(prompt, Request())
    assert not running.busy
    with pytest.raises(UserError, match="prefill_chunk=0"):
        scheduler(engine, prefill_chunk=0)


def test_a_slot_smaller_than_the_context_is_the_context(engine):
    running = scheduler(engine, capacity=16)
    stops = running.add([1] * 10, Request(temperature=0, max_new_tokens=20))
    slides = running.add([1] * 10, Request(temperature=0, max_new_tokens=20, context_end="slide"))
    drain(running)
    assert stops.finish_reason == "context" and len(stops.new_ids) == 7
    assert slides.finish_reason == "length" and slides.start > 0


def test_damage_in_the_weights_is_told(engine):
    broken = copy.deepcopy(engine.model)
    with torch.no_grad():
        broken.ln_f.weight[0] = float("nan")
    running = Scheduler(type(engine.runner)(broken).session(slots=1, capacity=8))
    sequence = running.add([1], Request())
    running.step()
    assert sequence.error is not None and not running.busy
