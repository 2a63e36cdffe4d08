"""Predictions of a model with a random head instead of W.

A copy that shares all other parameters gets the head; the model does not change. The expected loss
is that of a guess among V tokens, ln V, and the matrix adds V D parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from tiedgpt.errors import UserError
from tiedgpt.inspect.inputs import Model, Text, open_input
from tiedgpt.inspect.predictions import positions
from tiedgpt.inspect.results import SHOWN_ROWS, Figure, Result, lines
from tiedgpt.options import read_number
from tiedgpt.plots.panel import Panel
from tiedgpt.plots.table import number_cell, number_table, token_cells
from tiedgpt.tie.heads import copy_sharing


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomHead(Result):
    """A model's own head beside a random one (V, D), on the same hidden states."""

    loss: float  # the model's own, mean over the targets in nats
    random_loss: float  # with the random head
    uniform_loss: float  # ln V: every token is equally likely
    parameters: int  # of the model as it is, a shared matrix counted once
    random_parameters: int  # of the body and a head (V, D) of its own
    std: float  # standard deviation of the random matrix
    top_ids: np.ndarray  # (k,) the likeliest tokens after the text
    top_logprob: np.ndarray  # (k,) in nats
    random_top_ids: np.ndarray  # (k,) the same by the random head
    random_top_logprob: np.ndarray  # (k,)
    words: dict[int, str]  # the text of every id

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        losses = number_table(
            ("head", ["the model's own", "random", "a guess"]),
            ("loss", [self.loss, self.random_loss, self.uniform_loss]),
            ("parameters", [self.parameters, self.random_parameters, None]),
        )
        tokens = number_table(
            ("own", token_cells(self.words[id] for id in self.top_ids)),
            ("prob", np.exp(self.top_logprob)),
            ("random", token_cells(self.words[id] for id in self.random_top_ids)),
            ("prob", np.exp(self.random_top_logprob)),
        )
        std = number_cell(self.std)
        return f"{losses}\n\nthe likeliest tokens after the text; random: of std {std}\n{tokens}"

    @override
    def figure(self) -> Figure:
        columns = {"own head": self.top_logprob, "random head": self.random_top_logprob}
        curves = lines({name: np.exp(x) for name, x in columns.items()})
        ranks = [str(rank + 1) for rank in range(len(self.top_ids))]
        panel = Panel("after the text", "rank", curves, y_label="probability", x_names=ranks)
        return f"loss {self.loss:.3f} nats, with a random head {self.random_loss:.3f}", [panel]


@torch.no_grad()
def random_head(
    model: Model,
    tokenizer: Any = None,
    text: Text = "",
    *,
    top: int = 5,
    std: float = 0.02,
    seed: int = 0,
) -> RandomHead:
    """Return what replacing the head by a random matrix costs, in loss and in parameters.

    Arguments as of `positions`. `std` is GPT-2's own initialization; `seed` alone decides the
    draw. The model is not changed. Raises `UserError` as `positions`, and for a single token.
    """
    if not 0 < std < math.inf:
        raise UserError(f"must be positive and finite, got {std}", option="std")
    inputs = open_input(model, tokenizer, text, least=2)
    gpt, size, width = inputs.model, inputs.model.config.vocab_size, inputs.model.config.n_embd
    generator = torch.Generator().manual_seed(read_number("seed", seed, int, least=0))
    drawn = torch.randn(size, width, generator=generator, device="cpu") * std
    twin = copy_sharing(gpt)
    twin.head = nn.Linear(width, size, bias=False, device="meta")
    twin.head.weight = nn.Parameter(drawn.to(gpt.wpe.weight))
    original, replaced = (positions(one, None, inputs.ids[0], top=top) for one in (gpt, twin))
    likeliest, random = original.top_ids[-1], replaced.top_ids[-1]
    return RandomHead(
        loss=original.loss,
        random_loss=replaced.loss,
        uniform_loss=math.log(size),
        parameters=sum(parameter.numel() for parameter in gpt.parameters()),
        random_parameters=sum(parameter.numel() for parameter in twin.parameters()),
        std=std,
        top_ids=likeliest,
        top_logprob=original.top_logprob[-1],
        random_top_ids=random,
        random_top_logprob=replaced.top_logprob[-1],
        words=inputs.text(likeliest, random)["words"],
    )
