import copy
import dataclasses
import shutil

import pytest
import torch

from tests.train.conftest import CPU, train
from tiedgpt import GPT, GPTConfig
from tiedgpt.train import blocks
from tiedgpt.train.blocks import decide, in_training
from tiedgpt.train.events import Started
from tiedgpt.train.objectives.language import LanguageModelling
from tiedgpt.train.sizing import make_plan

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
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit(dtype, changes, plan):
    model = GPT(dataclasses.replace(CONFIG, **changes)).train()
    names, kept = list(model.state_dict()), gradients(model, dtype)
    in_training(model, dataclasses.replace(plan, recompute="blocks"))
    assert all(map(torch.equal, gradients(model, dtype), kept))
    assert list(model.state_dict()) == names
    assert "computed again in backward" in repr(model)


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


def test_recomputed_blocks_keep_little_for_backward(plan):
    model = GPT(dataclasses.replace(CONFIG, **SAME)).train()
    before = saved_for_backward(model)
    in_training(model, dataclasses.replace(plan, recompute="blocks"))
    assert saved_for_backward(model) < before / 5


def test_a_model_with_recomputed_blocks_generates_and_copies_as_ever(plan):
    model = GPT(CONFIG).eval()
    ids = torch.randint(90, (1, 7))
    before = model(ids)
    in_training(model, dataclasses.replace(plan, recompute="blocks"))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids), before)


def test_a_run_with_recomputed_blocks_is_the_same_run(new_run, config, plan):
    config = dataclasses.replace(config, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    weights = []
    for name in ("off", "blocks"):
        run, tokenizer = new_run(name)
        task = LanguageModelling(run, config, tokenizer)
        *_, ended = train(run, task, dataclasses.replace(plan, recompute=name), CPU)
        assert ended.finished
        weights.append((run.model / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_what_is_asked_for_is_planned(new_run, config, options):
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    assert make_plan(options, task, CPU).recompute == "off"
    asked = dataclasses.replace(options, recompute="blocks")
    assert make_plan(asked, task, CPU).recompute == "blocks"


def test_without_a_compiler_blocks_run_as_they_are_and_a_line_says_so(
    monkeypatch, new_run, config, options
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    compiles, line = decide("on", CPU)
    assert not compiles
    assert line.startswith("--compile on: no C++ compiler is here (g++, clang++")
    assert "install one or set CXX; the blocks run as they are" in line and "\n" not in line
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    assert make_plan(dataclasses.replace(options, compile="on"), task, CPU).compile == "off"


def test_blocks_are_compiled_by_themselves_on_a_gpu_and_for_rows_of_one_length(monkeypatch):
    monkeypatch.setattr(blocks, "missing", lambda device: None)
    gpu = torch.device("cuda")
    assert decide("auto", gpu) == (True, None)
    assert decide("auto", gpu, one_shape=False) == decide("auto", CPU) == (False, None)
    assert decide("on", CPU) == (True, None)
    assert decide("off", gpu) == (False, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_a_compiled_run_that_was_stopped_equals_one_that_was_not(new_run, config, plan):
    plan = dataclasses.replace(plan, compile="on")
    config = dataclasses.replace(config, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    weights = []
    for name, stops in (("whole", (6,)), ("resumed", (3, 6))):
        run, tokenizer = new_run(name)
        task = LanguageModelling(run, config, tokenizer)
        last = [0]
        for until in stops:
            for event in train(
                run, task, plan, CPU, stop_requested=lambda u=until, now=last: now[0] >= u
            ):
                last[0] = event.step
                if isinstance(event, Started):
                    assert any(note.startswith("compiled the blocks in") for note in event.notes)
                    assert not any("_orig_mod" in key for key in event.model.state_dict())
        weights.append((run.model / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_each_shape_has_code_of_its_own(monkeypatch):
    """torch compiles a code eight times at most and then runs it as it is."""

    def twice(x):
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    forms = [blocks.compiled(twice, torch.Size((4, n, 8))) for n in (16, 32)]
    assert forms[0].__code__ != forms[1].__code__ and forms[0](3) == forms[1](3) == 6
    assert blocks.compiled(twice, torch.Size((4, 16, 8))) is forms[0]
