import copy
import dataclasses

import pytest
import torch

from tests.train.conftest import CPU
from tiedgpt import GPT, GPTConfig
from tiedgpt.train import planning
from tiedgpt.train.language import LanguageModelling
from tiedgpt.train.loop import train
from tiedgpt.train.recomputing import in_training

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
    assert planning.make_plan(options, task, CPU).recompute == "off"
    asked = dataclasses.replace(options, recompute="blocks")
    assert planning.make_plan(asked, task, CPU).recompute == "blocks"
