import copy
import dataclasses

import pytest
import torch

from tests.train.conftest import CPU, DROPOUT, PLAN, assert_same
from tiedgpt import GPT, GPTConfig
from tiedgpt.train import step
from tiedgpt.train.events import Started
from tiedgpt.train.step import prepare_blocks

CONFIG = GPTConfig(vocab_size=90, n_positions=160, n_embd=32, n_layer=3, n_head=2)
SAME = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def gradients(model, dtype):
    """Gradients, and a number of the random stream after them."""
    ids, targets = torch.randint(90, (2, 2, 160), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model.loss(ids, targets)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(1)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("changes", [SAME, {}, {"attention_windows": (0, 40)}, {"norm": "post"}])
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit(dtype, changes):
    model = GPT(dataclasses.replace(CONFIG, **changes)).train()
    names, kept = list(model.state_dict()), gradients(model, dtype)
    prepare_blocks(model, dataclasses.replace(PLAN, recompute="blocks"))
    assert all(map(torch.equal, gradients(model, dtype), kept))
    assert list(model.state_dict()) == names
    assert "recomputed in backward" in repr(model)


def saved_for_backward(model) -> int:
    """Bytes of the tensors that wait for backward, parameters aside."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    held = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            held[tensor.data_ptr()] = tensor
        return tensor

    x = torch.zeros(2, 160, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer, block in enumerate(model.h):
            x = block(x, layer)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def test_recomputed_blocks_save_little_for_backward():
    model = GPT(dataclasses.replace(CONFIG, **SAME)).train()
    before = saved_for_backward(model)
    prepare_blocks(model, dataclasses.replace(PLAN, recompute="blocks"))
    assert saved_for_backward(model) < before / 5


def test_a_model_with_recomputed_blocks_generates_and_copies():
    model = GPT(CONFIG).eval()
    ids = torch.randint(90, (1, 7))
    before = model(ids)
    prepare_blocks(model, dataclasses.replace(PLAN, recompute="blocks"))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids), before)


def test_a_run_with_recomputed_blocks_has_the_same_result(trial):
    off, blocks = (trial(name, DROPOUT, recompute=name) for name in ("off", "blocks"))
    assert off.train()[-1].finished and blocks.train()[-1].finished
    weights = [run.run.model / "model.safetensors" for run in (off, blocks)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_requested_recomputation_and_compilation_are_planned(trial, options):
    run = trial()
    assert run.make_plan(options).recompute == "off"
    assert run.make_plan(options, recompute="blocks").recompute == "blocks"


def test_a_missing_compiler_is_named(monkeypatch, trial, options):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = step.find_missing(CPU)
    assert reason == "no C++ compiler is here (no-such-compiler): install one or set CXX"
    assert trial().make_plan(options, compile="on").compile == "off"


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(2**31, [1 << 30]), (32 << 20, [1 << 30, 32 << 20]), (0, [1 << 30, 32 << 20])],
)
def test_freed_memory_is_kept_as_far_as_the_c_library_allows(most, sizes):
    asked = []

    def set_malloc(option, value):
        asked.append((option, value))
        return value <= most or option == step.M_TRIM_THRESHOLD

    step.keep_memory(set_malloc)
    mapped = [(step.M_MMAP_THRESHOLD, size) for size in sizes]
    assert asked == [*mapped, *[(step.M_TRIM_THRESHOLD, 2**31 - 1)] * (most > 0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_a_stopped_compiled_run_equals_an_uninterrupted_one(trial):
    whole, parts = (trial(name, DROPOUT, compile="on") for name in ("whole", "parts"))
    for events in (whole.train(), parts.train(stop_after=3), parts.train()):
        (started,) = (event for event in events if isinstance(event, Started))
        assert any(note.startswith("compiled the blocks in") for note in started.notes)
        assert not any("_orig_mod" in key for key in started.model.state_dict())
    assert_same(whole, parts)


def test_each_shape_is_compiled_once(monkeypatch):
    """torch compiles a function eight times at most and then runs it eagerly."""

    def twice(x):
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    forms = [step.compile_for_shape(twice, torch.Size((4, n, 8))) for n in (16, 32)]
    assert forms[0].__code__ != forms[1].__code__ and forms[0](3) == forms[1](3) == 6
    assert step.compile_for_shape(twice, torch.Size((4, 16, 8))) is forms[0]
