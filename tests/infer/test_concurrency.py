"""Any number of threads ask one engine; what ends badly ends alone."""

import asyncio
import copy
import gc
import os
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.infer.conftest import equal
from tiedgpt.infer import ClosedError, Engine, QueueFullError
from tiedgpt.infer.scheduler import Request
from tiedgpt.infer.sequence import SequenceState
from tiedgpt.infer.slots import TokensToRun
from tiedgpt.infer.torch_session import TorchSession

SHORT = {"max_new_tokens": 12, "seed": 5}


class Broken(Exception):
    """An error that only tests raise."""


@pytest.fixture
def endless(engine):
    """Options of a text that goes on."""
    bias = {engine.tokenizer.eos_token_id: -float("inf")}
    return {"max_new_tokens": 10**9, "context_end": "slide", "logit_bias": bias}


def failing_after(n):
    """A processor that fails at the text's n-th token."""

    def process(ids, n_prompt, logits):
        if len(ids) - n_prompt >= n:
            raise Broken(f"after {n}")
        return logits

    return process


def within_a_minute(condition):
    """Wait until it is so."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tiedgpt-engine"]


def test_an_error_is_reported_in_a_list_and_raised_for_one_prompt(backend):
    def broken_for_nine(ids, n_prompt, logits):
        return failing_after(2)(ids, n_prompt, logits) if ids[0] == 9 else logits

    expected = backend.generate([[5], [6]], **SHORT)
    first, failed, last = backend.generate([[5], [9], [6]], processors=[broken_for_nine], **SHORT)
    equal([first, last], expected, exact=backend.backend == "kernels")
    assert failed.finish_reason == "error" and isinstance(failed.error, Broken)
    assert len(failed.ids) == len(failed.logprobs) == 2
    with pytest.raises(Broken):
        backend.generate([9], processors=[broken_for_nine], **SHORT)
    tokens = []
    with pytest.raises(Broken):
        for token in backend.stream([9], processors=[broken_for_nine], **SHORT):
            tokens.append(token.id)
    assert tokens == failed.ids


def test_a_processor_that_exits_ends_neither_thread_nor_program(engine):
    def leave(ids, n_prompt, logits):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        engine.generate([5], processors=[leave])
    assert engine.generate([5], **SHORT).ids


def test_a_failing_read_ends_its_requests_and_the_engine_continues(engine, monkeypatch, endless):
    read = TorchSession.read
    two = Engine(engine.model, slots=2, tokenizer=engine.tokenizer)
    came = threading.Event()

    def failing(session, slots, ids, **how):
        if came.is_set() and len(slots) == 2:
            came.clear()
            raise MemoryError("none left")
        return read(session, slots, ids, **how)

    monkeypatch.setattr(TorchSession, "read", failing)
    running = [two.stream([n], **endless) for n in (5, 6)]
    for generation in running:
        next(generation)
    waiting = two.submit([7], **SHORT)
    came.set()
    for generation in running:
        with pytest.raises(MemoryError, match="none left"):
            generation.result()
    equal([waiting.result()], [engine.generate([7], **SHORT)], exact=False)
    assert two.stats()["running"] == two.stats()["waiting"] == 0


def test_a_session_that_fails_to_open_is_reported_and_retried(engine, monkeypatch):
    again = Engine(engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(again.runner, "session", lambda **_: (_ for _ in ()).throw(Broken("room")))
        with pytest.raises(Broken, match="room"):
            again.generate([5])
        with pytest.raises(Broken, match="room"):
            again.score([5, 6])
    assert again.generate([5], **SHORT).ids


def test_a_cancelled_request_returns_its_partial_text(backend, endless):
    generation = backend.stream("the cat", seed=5, **endless)
    tokens = [next(generation) for _ in range(5)]
    assert not generation.done
    generation.cancel()
    tokens += generation
    completion = generation.result()
    assert generation.done and completion.finish_reason == "cancelled"
    assert [token.id for token in tokens] == completion.ids
    assert "".join(token.text for token in tokens) == completion.text
    generation.cancel()
    assert generation.result() is completion and list(generation) == []


def test_a_timeout_ends_running_and_waiting_requests_with_partial_text(
    engine, endless, monkeypatch
):
    ahead = [0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead[0], perf_counter=time.perf_counter
    )
    monkeypatch.setattr("tiedgpt.infer.scheduler.time", clock)
    one = Engine(engine.model, slots=1)
    first = one.stream([5], timeout=600, **endless)
    next(first)
    waiting = one.submit([6], timeout=600, **endless)
    ahead[0] = 601
    assert waiting.result().finish_reason == "timeout" and waiting.result().ids == []
    assert first.result().finish_reason == "timeout" and first.result().ids
    completion = engine.generate([5], max_new_tokens=30, timeout=0.0, num_beams=3)
    assert completion.finish_reason == "timeout"


def test_a_slow_result_raises_timeout_error_and_the_request_continues(engine, endless):
    generation = engine.submit([5], **endless)
    with pytest.raises(TimeoutError):
        generation.result(timeout=0.01)
    assert not generation.done
    next(iter(generation))
    generation.cancel()
    assert generation.result(timeout=60).ids


def test_an_abandoned_future_does_not_end_the_engine(engine, endless):
    async def give_up(generation):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(generation.future), 0.01)

    generation = engine.submit([5], **endless)
    asyncio.run(give_up(generation))
    generation.cancel()
    assert generation.result(timeout=60).finish_reason == "cancelled"
    assert engine.submit([5], **SHORT).result(timeout=60).ids


def test_an_engine_without_a_thread_tries_again(engine, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    with Engine(engine.model) as other:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="start new thread"):
            other.submit([5], **SHORT)
        monkeypatch.undo()
        assert other.submit([5], **SHORT).result(timeout=60).ids


def test_a_full_queue_refuses_submit_and_generate_waits(engine, endless):
    small = Engine(engine.model, slots=1, queue_size=2, tokenizer=engine.tokenizer)
    running = [small.submit([5], **endless) for _ in range(3)]
    within_a_minute(lambda: small.stats()["waiting"] == 2)
    with pytest.raises(QueueFullError, match=r"3 requests run or wait: .*queue_size"):
        small.submit([5])
    with ThreadPoolExecutor() as pool:
        patient = pool.submit(small.generate, [[5], [6]], **SHORT)
        for generation in running:
            generation.cancel()
        equal(patient.result(), engine.generate([[5], [6]], **SHORT), exact=False)
    assert small.submit([5], **SHORT).result().ids


def test_a_closed_engine_refuses_and_cancels_running_requests(engine, endless):
    others = set(engine_threads())
    with Engine(engine.model, slots=1, queue_size=1) as closing:
        running, waiting = (closing.submit([n], **endless) for n in (5, 6))
        pool = ThreadPoolExecutor(8)
        blocked = [pool.submit(closing.generate, [7], **endless) for _ in range(8)]
        within_a_minute(lambda: closing.stats()["waiting"] == 1)
        (thread,) = set(engine_threads()) - others
    assert running.result().finish_reason == waiting.result().finish_reason == "cancelled"
    assert not thread.is_alive()
    for future in blocked:
        with pytest.raises(ClosedError, match="was closed"):
            future.result(60)
    for ask in (closing.generate, closing.stream, closing.submit):
        with pytest.raises(ClosedError, match="was closed"):
            ask([5])
    with pytest.raises(ClosedError):
        closing.score([5, 6])
    closing.close()
    never = Engine(engine.model)
    never.close()
    before = engine_threads()
    with pytest.raises(ClosedError):
        never.generate([5])
    assert engine_threads() == before


def test_an_unreferenced_engine_ends_its_thread(make, endless):
    gc.collect()
    before = set(engine_threads())
    left = make()
    left.generate([5], **SHORT)
    generation = left.submit([5], **endless)
    (thread,) = set(engine_threads()) - before
    held = weakref.ref(left)
    del left
    assert next(generation) and held() is not None  # while its text may be waited for
    del generation
    gc.collect()
    assert held() is None
    within_a_minute(lambda: not thread.is_alive())


def test_an_unreferenced_generation_is_cancelled(engine, endless):
    generation = engine.submit([5], **endless)
    within_a_minute(lambda: engine.stats()["running"] == 1)
    del generation
    gc.collect()
    within_a_minute(lambda: engine.stats()["running"] == 0)


@pytest.mark.slow
def test_an_engine_sleeps_while_there_is_nothing_to_do(engine):
    engine.generate([5], **SHORT)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_generate(backend, endless):
    expected = backend.generate("the cat", **SHORT)
    running = backend.submit("the cat", **endless)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(backend.generate("the cat", **SHORT).ids != expected.ids)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    running.cancel()
    equal([backend.generate("the cat", **SHORT)], [expected], exact=backend.backend == "kernels")


def n_requests():
    """How many requests, texts and chunks are in memory."""
    gc.collect()
    kinds = {Request, SequenceState, TokensToRun}
    return sum(type(each) in kinds for each in gc.get_objects())  # isinstance runs foreign code


KINDS = [
    {"seed": 5},
    {"temperature": 0},
    {"seed": 3, "top_k": 5, "frequency_penalty": 0.5, "top_logprobs": 2},
    {"num_beams": 2},
    {"seed": 1, "prompt_logprobs": True},
    {"seed": 1, "context_end": "slide", "max_new_tokens": 30},
]
PROMPTS = [[n % 50 for n in range(35)] + [n] for n in range(3)] + [[5], [7, 8, 9], [10] * 20]


@pytest.mark.slow
def test_concurrent_threads_get_the_results_of_solo_runs(make):
    """One in eight requests fails, is cancelled or has no time left, at any moment.

    The other requests equal solo runs; slots, threads and requests are all released.
    """
    before = n_requests()
    crowded, solo = make(slots=6), make(slots=2)
    exact = solo.backend == "kernels"
    alone = {}
    dice = random.Random(7)
    asked = [(dice.randrange(len(PROMPTS)), dice.randrange(len(KINDS))) for _ in range(64)]
    for prompt, kind in set(asked):
        options = {"max_new_tokens": 10, **KINDS[kind]}
        alone[prompt, kind] = solo.generate(PROMPTS[prompt], **options)
    solo.close()
    crowded.generate([5])
    threads = set(threading.enumerate())

    def ask(number, ends, seconds):
        prompt, kind = asked[number]
        options = {"max_new_tokens": 10, **KINDS[kind]}
        if ends == "fails":
            options["processors"] = [failing_after(number % 7)]
        if ends == "late":
            options["timeout"] = seconds
        generation = crowded.stream if "num_beams" not in options else crowded.submit
        generation = generation(PROMPTS[prompt], **options)
        if ends == "cancelled":
            time.sleep(seconds)
            generation.cancel()
        try:
            return generation.result(60)
        except Broken:
            return None

    for _ in range(8 if exact else 3):
        ends = ["well"] * 56 + ["fails", "cancelled", "late", "fails"] * 2
        dice.shuffle(ends)
        with ThreadPoolExecutor(16) as pool:
            futures = [
                pool.submit(ask, number, end, 0.05 * dice.random())
                for number, end in enumerate(ends)
            ]
            completions = [future.result() for future in futures]
        for number, (end, completion) in enumerate(zip(ends, completions, strict=True)):
            if end == "well" or (completion and completion.finish_reason in ("stop", "length")):
                equal([completion], [alone[asked[number]]], exact=exact)
            elif completion is not None:
                expected = alone[asked[number]]
                assert completion.finish_reason in ("cancelled", "timeout", "context")
                assert completion.ids == expected.ids[: len(completion.ids)]
        told = crowded.stats()
        assert told["running"] == told["waiting"] == 0
        assert threads >= set(threading.enumerate())
    crowded.close()
    assert n_requests() <= before


def test_a_model_that_trains_meanwhile_is_not_disturbed(engine):
    model = copy.deepcopy(engine.model).train()
    model.h[0].eval()
    modes = [module.training for module in model.modules()]
    with_dropout = Engine(model)
    expected = engine.generate([5, 6], max_new_tokens=20, temperature=0)
    ids = torch.tensor([[5, 6, 7]])
    streams = [with_dropout.stream([5, 6], max_new_tokens=20, temperature=0) for _ in range(3)]
    next(streams[0])
    for _ in range(5):
        assert not torch.equal(model(ids), model(ids)), "dropout is on"
        model.loss(ids, ids).backward()
    with ThreadPoolExecutor() as pool:
        found = pool.map(
            lambda _: with_dropout.generate([5, 6], max_new_tokens=20, temperature=0), range(8)
        )
        assert [completion.ids for completion in found] == [expected.ids] * 8
    assert [stream.result().ids for stream in streams] == [expected.ids] * 3
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is not None for parameter in model.parameters())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    stop=st.lists(
        st.sampled_from(["t", "the", " ca", "é", "語。", "�", "\n", "at. t"]), max_size=3
    ),
    prompt=st.sampled_from(["the cat", "naïve", "日", "mat. "]),
    ends=st.sampled_from(["length", "cancelled"]),
)
def test_streamed_tokens_spell_the_text_before_its_earliest_stop_string(
    engine, seed, stop, prompt, ends
):
    ids, end = engine.tokenizer.encode("é語本日ï—"), engine.tokenizer.eos_token_id
    options = {"stop": stop, "seed": seed, "temperature": 1.5, "max_new_tokens": 25}
    options["logit_bias"] = dict.fromkeys(ids, 3.0)  # characters of several tokens
    generation = engine.stream(prompt, **options, top_logprobs=2)
    tokens = []
    for token in generation:
        tokens.append(token)
        if ends == "cancelled" and len(tokens) == seed % 20:
            generation.cancel()
    completion = generation.result()
    assert [token.id for token in tokens] == completion.ids
    assert [token.logprob for token in tokens] == completion.logprobs
    assert [token.top_logprobs for token in tokens] == completion.top_logprobs
    at = 0
    for token in tokens:
        assert token.offset == at
        at += len(token.text)
        assert completion.text[token.offset : at] == token.text
    assert at == len(completion.text)
    assert not any(text in completion.text for text in stop)
    if completion.finish_reason != "cancelled":
        equal([completion], [engine.generate(prompt, **options)], exact=False)
        reasons = [token.finish_reason for token in tokens]
        assert reasons == [None] * (len(tokens) - 1) + [completion.finish_reason]
        decoder = engine.tokenizer.stream(after=engine.tokenizer.encode(prompt)[-1])
        parts = [decoder.push(id) for id in completion.ids if id != end]
        if len({*stop}) == 1:  # of several, one may still begin before another's match
            assert stop[0] not in "".join(parts[:-1]), "the text did not end at once"
        whole = "".join(parts) + decoder.finish()
        stops = [whole.index(text) for text in stop if text in whole]
        assert completion.text == whole[: min(stops, default=len(whole))]
        has_ended = bool(stops) or completion.ids[-1] == end
        assert completion.finish_reason == ("stop" if has_ended else "length")


@pytest.mark.parametrize("prompt", [[3], [3] * 11])
@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": True}, {"num_beams": 2}])
def test_a_request_knows_when_it_reached_each_stage(engine, prompt, options):
    """A processor sees the clock just before each token is chosen."""
    clock = []

    def look(ids, n_prompt, logits):
        clock.append(time.monotonic())
        return logits

    before = time.monotonic()
    generation = engine.submit(
        prompt, max_new_tokens=3, processors=[look], logit_bias={7: 100}, **options
    )
    generation.result()
    times = generation.times
    assert before <= times.created <= times.started <= times.first_token <= times.ended
    assert times.ended <= time.monotonic()
    assert times.started <= clock[0] and times.first_token <= clock[-1] <= times.ended
    if not options.get("num_beams"):
        assert clock[0] <= times.first_token <= clock[1]


def test_a_request_that_never_had_a_slot_has_no_time_of_it(engine, endless):
    with Engine(engine.model, slots=1) as single:
        runs, waits = single.submit([1], **endless), single.submit([2], max_new_tokens=2)
        waits.cancel()
        waits.result()
        runs.cancel()
        assert waits.times.started is waits.times.first_token is None
        assert waits.times.ended >= waits.times.created
