"""What a model would predict with a random head of its own in the place of W.

Nothing in the model changes: its hidden states are multiplied by another matrix. The loss is about
that of a guess among V tokens, and the matrix is V D more parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiedgpt.errors import UserError
from tiedgpt.inspect.distributions import chunks, logits_of, measure, put, wide
from tiedgpt.inspect.opening import Model, Text, numpy, open_subject
from tiedgpt.inspect.results import Result
from tiedgpt.tie.heads import inference


@dataclass(frozen=True, kw_only=True)
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
        raise UserError(f"std must be positive and finite, got {std}")
    subject = open_subject(model, tokenizer, text, least=2)
    gpt, targets = subject.model, subject.targets
    size, width = gpt.config.vocab_size, gpt.config.n_embd
    drawn = torch.randn(size, width, generator=torch.Generator().manual_seed(seed)) * std
    drawn = drawn.to(targets.device)
    own: dict[str, torch.Tensor] = {}
    other: dict[str, torch.Tensor] = {}
    with inference(gpt):
        h = gpt.body(subject.ids)
        for rows in chunks(len(targets)):
            part = measure(logits_of(gpt, h[:, rows]), targets[rows], top)
            put(own, targets.shape, rows, part)
            part = measure(wide(h[0, rows]) @ drawn.to(wide(h).dtype).T, targets[rows], top)
            put(other, targets.shape, rows, part)
    likeliest, random = numpy(own["top_ids"][-1]), numpy(other["top_ids"][-1])
    in_body = (p.numel() for name, p in gpt.named_parameters() if not name.startswith("head."))
    return RandomHead(
        loss=-float(own["logprob"][:-1].double().mean()),
        random_loss=-float(other["logprob"][:-1].double().mean()),
        uniform_loss=math.log(size),
        parameters=sum(parameter.numel() for parameter in gpt.parameters()),
        random_parameters=sum(in_body) + size * width,
        std=std,
        top_ids=likeliest,
        top_logprob=numpy(own["top_logprob"][-1]),
        random_top_ids=random,
        random_top_logprob=numpy(other["top_logprob"][-1]),
        words=subject.text(likeliest, random)["words"],
    )
