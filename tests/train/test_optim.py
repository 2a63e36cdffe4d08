import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import assert_resumes
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.train.step.optim import OPTIMIZERS, OptimizerSpec, scale_lr_to_width
from tiedgpt.train.step.optim.groups import optimizers, parameter_groups


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer_name", ["adamw", "muon"])
def test_every_parameter_is_in_exactly_one_group(tiny_config, tied, optimizer_name):
    model = GPT(dataclasses.replace(tiny_config, tie_word_embeddings=tied))
    groups = parameter_groups(model, matrices=optimizer_name, weight_decay=0.1)
    grouped = [parameter for group in groups for parameter in group.parameters.values()]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    built = optimizers(groups, lr=1e-3)
    updated = [p for optimizer in built for g in optimizer.param_groups for p in g["params"]]
    assert len(updated) == len(set(updated)) == len(grouped)


def test_the_shared_matrix_is_a_separate_group_with_a_described_policy(tiny):
    first, *others = parameter_groups(tiny, matrices="muon", weight_decay=0.1)
    assert list(first.parameters) == ["wte.weight"]
    assert str(first) == "W, which reads and predicts: 3,104 parameters, AdamW, no decay"
    assert {g.name: (g.optimizer, g.weight_decay) for g in others} == {
        "positions": ("adamw", 0.0),
        "queries, keys and values": ("muon", 0.1),
        "matrices of the blocks": ("muon", 0.1),
        "norms and biases": ("adamw", 0.0),
    }


def test_c_attn_is_three_matrices_to_muon_and_one_parameter_to_adamw(tiny):
    groups = parameter_groups(tiny, matrices="muon", weight_decay=0.1)
    parts = {name: group.n_matrices for group in groups for name in group.parameters}
    assert {name for name, n in parts.items() if n == 3} == {
        f"h.{layer}.attn.c_attn.weight" for layer in range(3)
    }
    _, muon = optimizers(groups, lr=1e-2)
    before = tiny.h[0].attn.c_attn.weight.detach().clone()
    c_attn = tiny.h[0].attn.c_attn.weight
    c_attn.grad = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    muon.step()
    for moved in ((c_attn.detach() - before * (1 - 1e-3)) / (0.2 * 1e-2 * 32**0.5)).chunk(3):
        assert 0.6 < torch.linalg.svdvals(moved).mean() < 1.2  # each is near orthogonal
    names = [group.name for group in parameter_groups(tiny, matrices="adamw", weight_decay=0.1)]
    assert "queries, keys and values" not in names


def test_frozen_parameters_are_left_out(tiny):
    tiny.wte.weight.requires_grad_(False)
    groups = parameter_groups(tiny, matrices="adamw", weight_decay=0.1)
    names = [group.name for group in groups]
    assert not any(name.startswith("W") for name in names)


def test_a_step_moves_the_shared_matrix_once(tiny, ids):
    groups = parameter_groups(tiny, matrices="muon", weight_decay=0.0)
    built = optimizers(groups, lr=1e-2)
    before = tiny.wte.weight.detach().clone()
    tiny.loss(ids, ids).backward()
    for optimizer in built:
        optimizer.step()
    # AdamW's first step moves each element by lr, sign of its gradient, whatever its size.
    moved = (tiny.wte.weight.detach() - before).abs()
    assert moved.max().item() == pytest.approx(1e-2, rel=1e-3)
    (holder,) = (optimizer for optimizer in built if tiny.wte.weight in optimizer.state)
    assert holder.state[tiny.wte.weight]["step"] == 1


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675)."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = momentum.lerp(p.grad, 0.1).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
                momentum.lerp_(p.grad, 0.01)


def build_lion(groups, lr):
    return Lion(groups, {"lr": lr})


class CountingLion(Lion):
    """Lion that counts its steps in an int."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["n_steps"] = state.get("n_steps", 0) + 1


def build_counting(groups, lr):
    return CountingLion(groups, {"lr": lr})


def test_a_new_optimizer_is_one_record(trial, monkeypatch):
    home = f"{__name__}:build_lion"
    lion = OptimizerSpec(label="Lion", home=home, moments=1, width_exponent=1.0)
    monkeypatch.setitem(OPTIMIZERS, "lion", lion)
    whole, _ = assert_resumes(lambda name: trial(name, optimizer="lion", lr=1e-3), 3)
    saved = load_file(whole.newest("optimizer.safetensors"))
    assert {"h.0.mlp.c_fc.weight/momentum", "wte.weight/exp_avg"} < saved.keys()
    assert scale_lr_to_width(1e-3, width=128, to=512, optimizer="lion") == 2.5e-4


def test_an_optimizer_has_a_default_learning_rate_and_another_for_the_groups_of_adamw(monkeypatch):
    rates = {"lr_factor": 0.1, "adamw_factor": 10}
    lion = OptimizerSpec(label="Lion", home="lion:Lion", moments=1, width_exponent=1.0, **rates)
    monkeypatch.setitem(OPTIMIZERS, "lion", lion)
    assert scale_lr_to_width(4e-3, width=7, to=7, optimizer="lion") == pytest.approx(4e-4)
    torch.manual_seed(0)
    tiny = GPT(GPTConfig(vocab_size=11, n_positions=7, n_embd=6, n_layer=1, n_head=3))
    for name, factor in (("lion", 10), ("muon", 1)):
        groups = parameter_groups(tiny, matrices=name, weight_decay=0.1)
        assert {group.lr_factor for group in groups if group.optimizer == "adamw"} == {factor}
        assert {group.lr_factor for group in groups if group.optimizer == name} == {1}


def test_optimizer_state_that_is_no_tensor_is_refused_by_name(trial, monkeypatch):
    home = f"{__name__}:build_counting"
    counting = OptimizerSpec(label="Lion", home=home, moments=1, width_exponent=1.0)
    monkeypatch.setitem(OPTIMIZERS, "lion", counting)
    with pytest.raises(UserError, match="n_steps"):
        trial("a", optimizer="lion", lr=1e-3).train()
