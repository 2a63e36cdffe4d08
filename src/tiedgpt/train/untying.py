"""A model that is tied at first, and later gets a head of its own: `--untie-at`.

W is trained as one matrix as long as both uses pull it the same way, and as two from then on. The
head begins as W's copy, with a copy of what the optimizer holds of W: the step in which the model
is untied predicts as the tied one would have, and what is different afterwards is each matrix's
own gradient alone (and that a head is decayed, as `optim.parameter_groups` says).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiedgpt.core.model import GPT
from tiedgpt.tie.surgery import tie, untie
from tiedgpt.train.optim import Group, optimizers, parameter_groups
from tiedgpt.train.plan import Plan
from tiedgpt.train.task import Model

Optimizers = list[torch.optim.Optimizer]


def arranged(model: Model, plan: Plan, step: int) -> tuple[list[Group], Optimizers]:
    """Have the model be tied or not, as the plan says of the state after `step` steps.

    Returns the groups and fresh optimizers over its parameters. Weights are copied where a head
    comes in, and W stays where one goes: the caller is about to load both.
    """
    if plan.untie_at is not None:
        assert isinstance(model, GPT)
        if plan.untied(step) and model.head is None:
            untie(model)
        elif not plan.untied(step) and model.head is not None:
            tie(model, keep="input")
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    return groups, optimizers(groups, lr=plan.lr)


def untie_in_training(
    model: Model, before: Sequence[torch.optim.Optimizer], plan: Plan
) -> tuple[list[Group], Optimizers]:
    """Give the model a head of its own; return the groups, and optimizers that know what these did.

    Of the head they hold what they did of W: both moments and the number of its steps.
    """
    assert isinstance(model, GPT)
    held = {p: state for optimizer in before for p, state in optimizer.state.items()}
    groups, made = arranged(model, plan, plan.steps)
    assert isinstance(model.head, torch.nn.Linear)
    of_w = held.get(model.wte.weight, {})
    held[model.head.weight] = {name: value.clone() for name, value in of_w.items()}
    for optimizer in made:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if held.get(parameter):
                optimizer.state[parameter] = held[parameter]
    return groups, made
