"""The optimizer's groups, in which every parameter stands exactly once.

The matrix that reads and predicts is a group of its own: it is an embedding and a projection at
once, so whatever is decided about it is decided here, by name, and shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiedgpt.train.muon import Muon
from tiedgpt.train.objective import Model, body_of, predicts_tokens
from tiedgpt.train.plan import Plan, Rule

if TYPE_CHECKING:
    from tiedgpt.train.objective import Objective

Optimizers = list[torch.optim.Optimizer]
BETAS = (0.9, 0.95)
MOMENTUM = 0.95
RULES: dict[Rule, str] = {"adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class Group:
    """Parameters that share a policy."""

    name: str
    parameters: dict[str, nn.Parameter]
    rule: Rule
    weight_decay: float
    n_matrices: int = 1
    """Matrices in each parameter, below each other, of which Muon makes each orthogonal."""

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        decay = f"decay {self.weight_decay:g}" if self.weight_decay else "no decay"
        return f"{self.name}: {count:,} parameters, {RULES[self.rule]}, {decay}"


def parameter_groups(model: Model, *, matrices: Rule, weight_decay: float) -> list[Group]:
    """Sort the trainable parameters into groups: W, a head, positions, matrices, the rest.

    `matrices` is the rule for the blocks' matrices. W goes by AdamW: its gradient is dense from
    predicting and a few rows from reading, not the product that Muon is made for. And it is not
    decayed: the length of a row says how often its token is predicted, which decay would flatten.
    """
    gpt = body_of(model)
    both = gpt.config.tie_word_embeddings and predicts_tokens(model)
    shared = Group("W, which reads and predicts" if both else "W, which reads", {}, "adamw", 0.0)
    head = Group("head", {}, "adamw", weight_decay)
    positions = Group("positions", {}, "adamw", 0.0)
    products = Group("matrices of the blocks", {}, matrices, weight_decay)
    attention = Group("queries, keys and values", {}, matrices, weight_decay, n_matrices=3)
    rest = Group("norms and biases", {}, "adamw", 0.0)
    in_w = {id(parameter) for parameter in gpt.wte.parameters()}  # an adapter's, too
    in_body = {id(parameter) for part in (gpt.h, gpt.ln_f) for parameter in part.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in in_w:
            group = shared
        elif parameter is gpt.wpe.weight:
            group = positions
        elif id(parameter) in in_body:
            is_attention = name.endswith(".attn.c_attn.weight")
            matrix = attention if is_attention and matrices == "muon" else products
            group = matrix if parameter.ndim == 2 else rest
        else:
            group = head
        group.parameters[name] = parameter
    every = (shared, head, positions, attention, products, rest)
    return [group for group in every if group.parameters]


def optimizers(groups: list[Group], *, lr: float) -> Optimizers:
    """Return one optimizer for each rule in use, over the groups that go by it.

    AdamW is fused into one pass a step. Muon's update has the size of AdamW's, so that one rate
    serves both.
    """

    def of(rule: Rule) -> list[dict[str, Any]]:
        return [
            {
                "params": list(group.parameters.values()),
                "weight_decay": group.weight_decay,
                **({"n_matrices": group.n_matrices} if rule == "muon" else {}),
            }
            for group in groups
            if group.rule == rule
        ]

    made: Optimizers = []
    if adamw := of("adamw"):
        made.append(torch.optim.AdamW(adamw, lr=lr, betas=BETAS, fused=True))
    if muon := of("muon"):
        made.append(Muon(muon, lr=lr, momentum=MOMENTUM))
    return made


def set_rate(optimizers: Optimizers, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate


def make_optimizers(
    objective: Objective, model: Model, plan: Plan
) -> tuple[list[Group], Optimizers]:
    """Return the parameter groups of a model and fresh optimizers over them."""
    groups = objective.parameter_groups(model, plan)
    return groups, optimizers(groups, lr=plan.lr)
