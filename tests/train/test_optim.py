import dataclasses

import pytest

from tiedgpt import GPT
from tiedgpt.train.optim import learning_rate, optimizers, parameter_groups


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_every_parameter_stands_in_exactly_one_group(tiny_config, tied, rule):
    model = GPT(dataclasses.replace(tiny_config, tie_word_embeddings=tied))
    groups = parameter_groups(model, matrices=rule, weight_decay=0.1)
    grouped = [parameter for group in groups for parameter in group.parameters.values()]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    made = optimizers(groups, lr=1e-3)
    held = [p for optimizer in made for g in optimizer.param_groups for p in g["params"]]
    assert len(held) == len(set(held)) == len(grouped)


def test_the_shared_matrix_is_a_group_of_its_own_with_its_policy_in_words(tiny):
    first, *others = parameter_groups(tiny, matrices="muon", weight_decay=0.1)
    assert list(first.parameters) == ["wte.weight"]
    assert str(first) == "W, which reads and predicts: 3,104 parameters, AdamW, no decay"
    assert {g.name: (g.rule, g.weight_decay) for g in others} == {
        "positions": ("adamw", 0.0),
        "matrices of the blocks": ("muon", 0.1),
        "norms and biases": ("adamw", 0.0),
    }


def test_frozen_parameters_are_left_out(tiny):
    tiny.wte.weight.requires_grad_(False)
    groups = parameter_groups(tiny, matrices="adamw", weight_decay=0.1)
    names = [group.name for group in groups]
    assert not any(name.startswith("W") for name in names)


def test_the_rate_rises_to_its_peak_and_falls_to_nothing():
    rates = [learning_rate(step, peak=1.0, warmup=10, steps=100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 90)
    assert learning_rate(0, peak=1.0, warmup=0, steps=1) == 1.0


def test_a_step_moves_the_shared_matrix_once(tiny, ids):
    groups = parameter_groups(tiny, matrices="muon", weight_decay=0.0)
    made = optimizers(groups, lr=1e-2)
    before = tiny.wte.weight.detach().clone()
    tiny.loss(ids, ids).backward()
    for optimizer in made:
        optimizer.step()
    # AdamW's first step moves each element by lr, sign of its gradient, whatever its size.
    moved = (tiny.wte.weight.detach() - before).abs()
    assert moved.max().item() == pytest.approx(1e-2, rel=1e-3)
    (holder,) = (optimizer for optimizer in made if tiny.wte.weight in optimizer.state)
    assert holder.state[tiny.wte.weight]["step"] == 1
