"""Parameter groups and their optimizers.

Every trainable parameter is in exactly one group. W is a group of its own, because it is an
embedding and a projection at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import Model, body_of, predicts_tokens
from tiedgpt.train.step.optim import OPTIMIZERS, find_optimizer

BETAS = (0.9, 0.95)
"""Betas of AdamW: Brown et al. 2020, appendix B."""
Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same optimizer and weight decay."""

    name: str
    parameters: dict[str, nn.Parameter]
    optimizer: str
    weight_decay: float
    lr_factor: float = 1.0
    """Learning rate as a multiple of the plan's."""
    n_matrices: int = 1
    """Number of matrices stacked in each parameter; Muon updates them one by one."""

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        decay = f"decay {self.weight_decay:g}" if self.weight_decay else "no decay"
        return f"{self.name}: {count:,} parameters, {OPTIMIZERS[self.optimizer].label}, {decay}"


def parameter_groups(model: Model, *, matrices: str, weight_decay: float) -> list[ParameterGroup]:
    """Sort the trainable parameters into groups: W, a head, positions, matrices, the rest.

    `matrices` is the optimizer of the blocks' matrices. AdamW updates W: its gradient is dense from
    predicting and a few rows from reading, not the product that Muon is made for. W has no weight
    decay: the norm of a row grows with the frequency of its token, which decay would flatten.
    """
    spec = find_optimizer(matrices)
    factor = 1.0 if matrices == "adamw" else spec.adamw_factor
    gpt = body_of(model)
    both = gpt.config.tie_word_embeddings and predicts_tokens(model)
    shared = ParameterGroup(
        "W, which reads and predicts" if both else "W, which reads", {}, "adamw", 0.0, factor
    )
    head = ParameterGroup("head", {}, "adamw", weight_decay, factor)
    positions = ParameterGroup("positions", {}, "adamw", 0.0, factor)
    products = ParameterGroup("matrices of the blocks", {}, matrices, weight_decay)
    attention = ParameterGroup("queries, keys and values", {}, matrices, weight_decay, n_matrices=3)
    rest = ParameterGroup("norms and biases", {}, "adamw", 0.0, factor)
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
            matrix = attention if is_attention and spec.splits_attention else products
            group = matrix if parameter.ndim == 2 else rest
        else:
            group = head
        group.parameters[name] = parameter
    every = (shared, head, positions, attention, products, rest)
    return [group for group in every if group.parameters]


def optimizers(groups: list[ParameterGroup], *, lr: float, is_sharded: bool = False) -> Optimizers:
    """Return one optimizer for each name in use, in the order of `OPTIMIZERS`."""
    result: Optimizers = []
    for name, spec in OPTIMIZERS.items():
        torch_groups: list[dict[str, Any]] = [
            {
                "params": list(group.parameters.values()),
                "weight_decay": group.weight_decay,
                "lr_factor": group.lr_factor,
                **({"n_matrices": group.n_matrices} if spec.splits_attention else {}),
            }
            for group in groups
            if group.optimizer == name
        ]
        if torch_groups:
            home = spec.home_sharded if is_sharded and spec.home_sharded else spec.home
            module, _, build = home.partition(":")
            result.append(getattr(import_module(module), build)(torch_groups, lr=lr))
    return result


def build_adamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), fused into one pass."""
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def make_optimizers(
    model: Model, plan: Plan, *, is_sharded: bool = False
) -> tuple[list[ParameterGroup], Optimizers]:
    """Return the parameter groups of a model and fresh optimizers over them."""
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    return groups, optimizers(groups, lr=plan.lr, is_sharded=is_sharded)
