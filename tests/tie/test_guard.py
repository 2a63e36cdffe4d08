"""The guard names the line of user code, exactly, whatever the code around it looks like."""

import asyncio
import contextlib
import copy
import inspect
import re
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import TINY
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.tie import replace_head, resize_vocab, tie, untie
from tiedgpt.tie.guards import TieBrokenError, TieWarning, guard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

SPECIAL = {"bos_token_id": 1, "eos_token_id": 1}
LM_HEAD, WTE = "lm_head.weight", "transformer.wte.weight"


@pytest.fixture
def peer() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**TINY, **SPECIAL)).eval()


@pytest.fixture
def empty_theirs() -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**TINY, **SPECIAL)).eval()


@pytest.fixture(autouse=True)
def no_trace_is_left():
    before = sys.gettrace()
    yield
    assert sys.gettrace() is before


def assign(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict(), assign=True)  # HERE


def marked(function, mark: str = "# HERE") -> list[tuple[str, int]]:
    """Return where in a function's source the mark stands."""
    lines, start = inspect.getsourcelines(function)
    return [(__file__, start + i) for i, line in enumerate(lines) if line.rstrip().endswith(mark)]


def run(body, *arguments) -> list[tuple[str, str, int]]:
    """Run a body that guards and returns the watch; return its events, warned of at their lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TieWarning)
        watch = body(*arguments)
    caught = [w for w in caught if w.category is TieWarning]
    assert [(w.filename, w.lineno) for w in caught] == [(e.file, e.line) for e in watch.events]
    return watch.events


def watched(model, change):
    """Return the watch of a guard under which a change was run."""
    with guard(model) as watch:
        change()
    return watch


def assert_blames_the_marks(body, model=None):
    """Assert that the events of a body, or of a change of a model, name its marked lines."""
    events = run(body) if model is None else run(watched, model, body)
    assert [(event.file, event.line) for event in events] == marked(body)
    assert all("# HERE" in event.code for event in events)
    return events


# What is noticed


CHANGES = {
    "a load that assigns": (
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        "aliased", r"step it twice.*tie\(model\)",
    ),
    "a load of two tensors": (
        lambda model: model.load_state_dict(
            {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
        ), "split", "tie",
    ),
    "a larger head": (
        lambda model: setattr(model, "lm_head", nn.Sequential(nn.Dropout(), nn.Linear(32, 97))),
        "split", r"in the place of lm_head\.weight is lm_head\.1\.weight",
    ),
    "a head of another shape": (
        lambda model: setattr(model, "lm_head", nn.Sequential(nn.Linear(32, 2))),
        "split", r"lm_head\.weight is gone.*put one back",
    ),
    "an embedding resized alone": (
        lambda model: setattr(model.transformer, "wte", nn.Embedding(99, 32)),
        "split", r"\(97, 32\) were one matrix.*\(99, 32\)",
    ),
    "a deep copy put in place": (
        lambda model: setattr(model, "transformer", copy.deepcopy(model.transformer)),
        "split", "is another matrix now",
    ),
}  # fmt: skip
"""The change, the kind of event, and its text."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_reported_at_its_line(peer, name):
    change, kind, says = CHANGES[name]

    def body():
        with guard(peer) as watch:
            change(peer)
            peer.eval()
        return watch

    (event,) = run(body)
    assert event.file == __file__ and event.line - change.__code__.co_firstlineno in range(3)
    assert event.kind == kind and set(event.names) == {LM_HEAD, WTE}
    assert re.search(says, str(event)), str(event)
    assert event.code and str(event).startswith(f"{__file__}:{event.line}: `{event.code}`")


def test_to_empty_from_the_meta_device_unties_and_is_reported(empty_theirs):
    def change():
        empty_theirs.to_empty(device="cpu")  # HERE

    (event,) = assert_blames_the_marks(change, empty_theirs)
    assert event.kind == "split" and "tie(model)" in event.advice


def test_a_report_names_the_shape_before_the_change(peer):
    peer.lm_head.weight = nn.Parameter(peer.transformer.wte.weight.data)

    def change():
        peer.transformer.wte.weight.data = torch.zeros(99, 32)  # HERE

    (event,) = assert_blames_the_marks(change, peer)
    assert f"{WTE} (97, 32) were one matrix" in event.text and "now, (99, 32)" in event.text


def test_a_parameter_shared_again_is_reported(peer):
    def change():
        peer.lm_head = nn.Linear(32, 97, bias=False)  # HERE
        peer.lm_head.weight = peer.transformer.wte.weight  # HERE
        peer.lm_head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 97))  # HERE
        tie(peer)  # HERE
        peer.lm_head[1].weight.data = peer.lm_head[1].weight.data.clone()

    kinds = [event.kind for event in assert_blames_the_marks(change, peer)]
    assert kinds == ["split", "joined", "split", "joined"]


def test_an_adapter_on_a_copy_is_reported_and_a_tied_one_is_not(peer):
    def body():
        config = LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"])
        with guard(peer) as watch:
            adapted = get_peft_model(peer, config)  # HERE
            adapted.train()
        return watch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (event,) = assert_blames_the_marks(body)
        assert event.kind == "split"
        assert "ensure_weight_tying=True" in event.advice
        assert "lm_head.modules_to_save.default.weight" in event.text
        for values in ({}, {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}):
            fresh = GPT2LMHeadModel(peer.config)
            with guard(fresh) as watch:
                get_peft_model(fresh, LoraConfig(target_modules=["c_attn"], **values))
            assert not watch.events


def test_our_model_is_reported_with_another_head(tiny):
    def change():
        tiny.to(torch.bfloat16)
        resize_vocab(tiny, 99)
        tiny.load_state_dict(tiny.state_dict(), assign=True)
        untie(tiny)  # HERE
        tie(tiny)  # HERE
        replace_head(tiny, nn.Sequential(nn.Linear(32, 99)).bfloat16())  # HERE
        tie(tiny)  # HERE
        tiny.head = nn.Linear(32, 99)  # HERE

    events = assert_blames_the_marks(change, tiny)
    assert [e.kind for e in events] == ["split", "joined", "split", "joined", "split"]
    assert "head.weight and wte.weight (99, 32) were one matrix" in events[0].text
    assert not any("config" in event.advice for event in events[:4])  # these changed it, too
    tiny.head = None
    with pytest.warns(TieWarning), guard(tiny) as watch:
        tiny.head = nn.Linear(32, 99)
    (event,) = watch.events
    assert "replace_head(model, model.head) lets the config say so" in event.advice
    assert "tie_word_embeddings" not in event.advice  # it is frozen


@pytest.mark.parametrize("claim", [True, False])
def test_only_a_contradicting_config_is_mentioned(peer, claim):
    peer.config.tie_word_embeddings = claim
    without = nn.ModuleDict({"lm_head": peer.lm_head, "wte": peer.transformer.wte})
    for module in (peer, without):
        peer.lm_head.weight = peer.transformer.wte.weight
        with pytest.warns(TieWarning, match="one again"), guard(module) as watch:
            peer.lm_head.weight = nn.Parameter(peer.lm_head.weight.detach().clone())
        (event,) = watch.events
        advised = "config.tie_word_embeddings=False" in event.advice
        assert advised == (module is peer and claim is True)


def test_no_report_without_a_change(peer, tiny, ids):
    with guard(peer) as first, guard(tiny) as second:
        for model in (peer, tiny):
            model.train().half().float().eval()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            logits = model(ids)
            getattr(logits, "logits", logits).sum().backward()
            optimizer.step()
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            copy.deepcopy(model)
        peer.resize_token_embeddings(101, mean_resizing=False)
    assert first.events == second.events == []


@pytest.mark.parametrize("layer", [nn.Linear, nn.LazyLinear])
def test_any_two_parameters_are_watched_once_they_have_a_shape(layer):
    third = layer(4, 4) if layer is nn.Linear else layer(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), third)
    model[1].weight = model[0].weight

    def change():
        model(torch.zeros(1, 4))
        model[2].weight = model[0].weight  # HERE
        model[1] = nn.Linear(4, 4)  # HERE

    assert [e.kind for e in assert_blames_the_marks(change, model)] == ["joined", "split"]


# Whose line it is


def in_a_function_that_the_body_calls(model):
    with guard(model) as watch:
        split_in_the_middle(model)
        model.eval()
    return watch


def split_in_the_middle(model):
    x = 1 + 1
    model.lm_head = nn.Linear(32, 97)  # HERE
    return x


def in_the_callers_own_expression(model):
    def innocent(x):
        y = x
        return y

    with guard(model) as watch:
        innocent(3)
        setattr(model, innocent("lm_head"), nn.Linear(innocent(32), 97))  # HERE
        innocent(4)
    return watch


def in_the_last_lines_of_a_function_and_of_the_body(model):
    with guard(model) as watch:
        assign(model)
        tie(model)  # HERE
    return watch


def in_a_pass_of_a_loop_and_over_several_lines(model):
    with guard(model) as watch:
        for step in range(5):
            if step == 3:
                model.load_state_dict(  # HERE
                    model.state_dict(),
                    assign=True,
                )
            torch.zeros(step)
    return watch


def in_comprehensions_lambdas_and_generators(model):
    with guard(model) as watch:
        [assign(model) for _ in range(1)]
        tie(model)  # HERE
        change = lambda: setattr(model, "lm_head", nn.Linear(32, 97))  # noqa: E731 # HERE
        list(change() for _ in range(1))
    return watch


def after_a_caught_exception(model):
    with guard(model) as watch:
        try:
            model.lm_head = nn.Linear(32, 97)  # HERE
            raise ValueError("ours")
        except ValueError:
            model.eval()
        tie(model)  # HERE
    return watch


def before_a_return(model):
    with guard(model) as watch:
        if model is not None:
            return assign(model) or watch


def through_an_exit_stack(model):
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(guard(model))
        x = 1
        model.lm_head = nn.Linear(32 * x, 97)  # HERE
    return watch


BLAMED = [
    (in_a_function_that_the_body_calls, [split_in_the_middle]),
    (in_the_last_lines_of_a_function_and_of_the_body, [assign, None]),
    (in_comprehensions_lambdas_and_generators, [assign, None]),
    (before_a_return, [assign]),
    (in_the_callers_own_expression, [None]),
    (in_a_pass_of_a_loop_and_over_several_lines, [None]),
    (after_a_caught_exception, [None]),
    (through_an_exit_stack, [None]),
]
"""A body, and the functions whose marked lines it changes the tie in; None is the body itself."""


@pytest.mark.parametrize(("body", "functions"), BLAMED)
def test_the_line_of_the_change_is_reported(peer, body, functions):
    lines = [line for function in functions for line in marked(function or body)]
    assert [(event.file, event.line) for event in run(body, peer)] == lines


def test_a_users_hook_is_reported(peer, ids):
    def hook(module, inputs, output):
        peer.lm_head = nn.Linear(32, 97)  # HERE

    def body():
        peer.transformer.ln_f.register_forward_hook(hook)
        with guard(peer) as watch, torch.no_grad():
            peer(ids)
        return watch

    assert [(e.file, e.line) for e in run(body)] == marked(hook)


def test_an_exception_in_the_body_propagates_and_the_change_is_reported(peer):
    watches = []

    def body():
        with guard(peer) as watch:
            watches.append(watch)
            assign(peer) or print(1 / 0)  # HERE
        return watch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TieWarning)
        with pytest.raises(ZeroDivisionError):
            body()
    (event,) = watches[0].events
    assert (event.file, event.line) in marked(assign)


def test_nested_guards_each_see_their_own_module(peer, tiny):
    def body():
        with guard(peer) as outer:
            with guard(tiny) as inner:
                peer.lm_head = nn.Linear(32, 97)  # OUTER
                untie(tiny)  # INNER
            tie(peer)  # OUTER
        return outer, inner

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TieWarning)
        outer, inner = body()
    assert [(e.file, e.line) for e in outer.events] == marked(body, "# OUTER")
    assert [(e.file, e.line) for e in inner.events] == marked(body, "# INNER")
    assert len(caught) == 3


def test_only_the_thread_that_entered_is_traced(peer):
    def trace_of_another_thread():
        traces = []
        thread = threading.Thread(target=lambda: traces.append(sys.gettrace()))
        thread.start()
        thread.join()
        return traces[0]

    outside = trace_of_another_thread()
    with guard(peer):
        assert type(trace_of_another_thread()) is type(outside)


def test_guards_that_end_out_of_order_each_blame_the_right_line(peer, tiny):
    def body():
        a, b = guard(peer), guard(tiny)
        a.__enter__()
        b.__enter__()
        a.__exit__(None, None, None)
        x = 1
        untie(tiny)  # HERE
        x += 1
        peer.lm_head = nn.Linear(32, 97)
        b.__exit__(None, None, None)
        assert not a.events
        return b

    before = sys.gettrace()
    assert_blames_the_marks(body)
    assert sys.gettrace() is before and inspect.currentframe().f_trace is None


def test_tasks_that_each_guard_a_model_do_not_disturb_each_other(peer, tiny):
    async def first(turns):
        with guard(peer) as watch:
            await turns[0].wait()
            peer.lm_head = nn.Linear(32, 97)  # FIRST
            turns[1].set()
        return watch

    async def second(turns):
        with guard(tiny) as watch:
            turns[0].set()
            await turns[1].wait()
            await asyncio.sleep(0)
            untie(tiny)  # SECOND
            await asyncio.sleep(0)
        return watch

    async def both():
        turns = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(first(turns), second(turns))

    before = sys.gettrace()
    with pytest.warns(TieWarning):
        one, two = asyncio.run(both())
    assert sys.gettrace() is before
    assert [(e.file, e.line) for e in one.events] == marked(first, "# FIRST")
    assert [(e.file, e.line) for e in two.events] == marked(second, "# SECOND")


def test_a_guard_that_ends_in_another_thread_leaves_no_tracer(peer):
    remaining = []

    def end():
        watch.__exit__(None, None, None)
        remaining.append(sys.gettrace())

    before = sys.gettrace()
    watch = guard(peer).__enter__()
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    watch.events.copy()
    assert sys.gettrace() is before and not watch.events
    assert getattr(remaining[0], "__self__", None) is None


def test_a_function_is_watched_again_after_its_guard_ended_in_another_thread(peer, tiny):
    def body():
        watch = guard(tiny).__enter__()
        thread = threading.Thread(target=watch.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with guard(peer) as watch:
            peer.lm_head.weight = nn.Parameter(peer.lm_head.weight.clone())  # HERE
            peer.eval()
        return watch

    assert_blames_the_marks(body)


def test_a_generator_is_watched_again_after_guards_that_ended_out_of_order(peer, tiny):
    def body():
        def steps():
            with guard(tiny):
                yield
            yield
            with guard(peer) as watch:
                peer.lm_head.weight = nn.Parameter(peer.lm_head.weight.clone())  # HERE
                peer.eval()
            yield watch

        generator = steps()
        next(generator)
        outer = guard(tiny).__enter__()
        next(generator)
        outer.__exit__(None, None, None)
        return next(generator)

    assert_blames_the_marks(body)


# Other trace functions


def test_a_guard_refuses_to_replace_another_trace_function(tiny):
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(UserError, match="debugger"), guard(tiny):
            raise AssertionError("not reached")
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


# Raising


def test_with_raise_the_guard_stops_before_the_next_line(peer):
    reached = []
    with pytest.raises(TieBrokenError, match=r"test_guard\.py:\d+.*were one Parameter") as error:
        with guard(peer, action="raise"):
            reached.append(1)
            assign(peer)
            reached.append(2)
    assert reached == [1]
    assert isinstance(error.value, CheckFailedError) and error.value.exit_code == 6


def test_with_raise_the_guard_raises_for_the_last_line(peer):
    for model in (peer, copy.deepcopy(peer)):
        with pytest.raises(TieBrokenError), guard(model, action="raise"):
            model.lm_head = nn.Linear(32, 97)


def test_an_error_of_the_body_is_not_replaced(peer):
    with pytest.warns(TieWarning), pytest.raises(ZeroDivisionError):
        with guard(peer, action="raise"):
            setattr(peer, "lm_head", nn.Linear(32, 97)) or print(1 / 0)


def test_a_warning_turned_into_an_error_stops_at_the_line(peer):
    with pytest.raises(TieWarning), warnings.catch_warnings():
        warnings.simplefilter("error", TieWarning)
        with guard(peer) as watch:
            assign(peer)
            raise AssertionError("not reached")
    assert len(watch.events) == 1


def test_an_outer_guard_continues_after_an_inner_one_raised(peer, tiny):
    def change():
        with contextlib.suppress(TieBrokenError):
            with guard(tiny, action="raise"):
                untie(tiny)
                raise AssertionError("not reached")
        peer.lm_head = nn.Linear(32, 97)  # HERE

    assert_blames_the_marks(change, peer)


def test_unsupported_objects_are_refused(tiny):
    with pytest.raises(UserError, match=r"watches a torch\.nn\.Module"):
        guard("gpt2")
    with pytest.raises(UserError, match=r"action must be .*got 'shout'"):
        guard(tiny, action="shout")
    watch = guard(tiny)
    with watch, pytest.raises(UserError, match="in use"):
        watch.__enter__()


def test_the_source_of_a_script_is_named(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "def main(guard, model, nn):\n"
        "    with guard(model) as watch:\n"
        "        model.head = nn.Linear(32, 97)\n"
        "        model.eval()\n"
        "    return watch\n"
    )
    names: dict[str, object] = {}
    exec(compile(script.read_text(), str(script), "exec"), names)
    events = run(lambda: names["main"](guard, GPT(GPTConfig(**TINY)), nn))
    assert [(e.file, e.line, e.code) for e in events] == [
        (str(script), 3, "model.head = nn.Linear(32, 97)")
    ]


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_installed_code_is_never_reported_as_the_users(peer, tmp_path: Path, folder):
    library = tmp_path / "lib" / folder / "mylib.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        "def change(model, head):\n"  # as `pip install --user` or the system's packages
        "    model.lm_head = head\n"
        "    return model\n"
    )
    names: dict[str, object] = {}
    exec(compile(library.read_text(), str(library), "exec"), names)

    def change():
        names["change"](peer, nn.Linear(32, 97))  # HERE

    assert_blames_the_marks(change, peer)
