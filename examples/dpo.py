"""Direct preference optimization: learn from pairs of a preferred and a rejected reply.

    cd examples
    tiedgpt train pairs.jsonl --objective dpo:Preferences --start MODEL --lr 1e-5

Each line of pairs.jsonl is {"prompt": ..., "chosen": ..., "rejected": ...}. The loss is equation 7
of Rafailov et al. 2023 (arXiv 2305.18290). The log-probabilities of the reference model, which is
the model to start from, are computed once, before the first step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tiedgpt import GPT, Tokenizer
from tiedgpt.core.loss import IGNORED
from tiedgpt.data import permutation
from tiedgpt.errors import UserError
from tiedgpt.evaluate.perplexity import totals
from tiedgpt.heads import pad
from tiedgpt.train.dataset import Data, Sources
from tiedgpt.train.objective import Arrays, ModelSetup, Objective
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.storage import RunDirectory

BETA = 0.1
"""Strength of the pull towards the reference model."""
PAIRS_PER_HELD_OUT = 10
"""One pair in this many is held out."""


def reply_logprobs(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each reply, (B, 2), from ids and targets (B, 2, T)."""
    logprobs = model(ids.flatten(0, 1)).log_softmax(-1).view(*ids.shape, -1)
    counted = targets != IGNORED
    picked = logprobs.gather(-1, targets.where(counted, 0)[..., None]).squeeze(-1)
    return (picked * counted).sum(-1)


def dpo_loss(policy: Tensor, reference: Tensor, beta: float = BETA) -> Tensor:
    """Return the loss of each pair, (B,), from log-probabilities (B, 2) of chosen and rejected."""
    margin = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    return -F.logsigmoid(beta * margin)


class Pairs(Sources):
    """Lines with a prompt, a preferred reply and a rejected one."""

    def __init__(self, paths: Iterable[str]) -> None:
        lines = [line for path in paths for line in Path(path).read_text().splitlines()]
        self.pairs = [json.loads(line) for line in lines]
        if len(self.pairs) < 2:
            raise UserError(f"{len(self.pairs)} pairs are too few to hold one out")
        self.n_held_out = max(1, len(self.pairs) // PAIRS_PER_HELD_OUT)

    def digest(self) -> str:
        """Return the sha256 of all pairs."""
        return hashlib.sha256(json.dumps(self.pairs).encode()).hexdigest()

    def encode_pairs(self, tokenizer: Tokenizer, context: int) -> tuple[Tensor, Tensor]:
        """Return ids and targets (N, 2, T); only the tokens of replies are targets."""
        ids, targets = [], []
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        for pair in self.pairs:
            prompt = tokenizer.encode(pair["prompt"])
            for name in ("chosen", "rejected"):
                row = [*prompt, *tokenizer.encode(pair[name]), *end][: context + 1]
                ids.append(row[:-1])
                targets.append([IGNORED] * (len(prompt) - 1) + row[len(prompt) :])
        shape = len(self.pairs), 2, -1
        return pad(ids)[0].view(shape), pad(targets, pad_id=IGNORED)[0].view(shape)


@dataclass(frozen=True)
class PreferenceScore:
    """The score on held-out pairs."""

    nats: float
    """Mean loss."""
    accuracy: float
    """Share of pairs whose preferred reply gained on the rejected one."""


class Preferences(Objective):
    """Prefer the chosen reply; a batch is ids, targets (B, 2, T), and reference (B, 2)."""

    @classmethod
    def open(cls, options: TrainOptions) -> Pairs:
        """Read the pairs of the options."""
        if options.start is None:
            raise UserError("DPO needs a model to start from", hint="give --start MODEL")
        return Pairs(options.data)

    @classmethod
    def make(
        cls, sources: Any, run: RunDirectory, options: TrainOptions, setup: ModelSetup
    ) -> tuple[Self, Data]:
        """Return the objective and the pairs with the reference's log-probabilities."""
        assert setup.start is not None
        context = options.context or setup.config.n_positions
        ids, targets = sources.encode_pairs(setup.tokenizer, context)
        model = setup.start.gpt.eval()
        with torch.no_grad():
            pieces = zip(ids.split(8), targets.split(8), strict=True)
            reference = torch.cat([reply_logprobs(model, *piece) for piece in pieces])
        rows = ids.numpy(), targets.numpy(), reference.numpy()
        train = [array[sources.n_held_out :] for array in rows]
        held = [array[: sources.n_held_out] for array in rows]
        n = len(train[0])

        def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
            def batch(step: int) -> Arrays:
                places = [divmod(step * batch_size + row, n) for row in range(batch_size)]
                chosen = [permutation(n, seed=seed, epoch=epoch)[at] for epoch, at in places]
                return tuple(array[chosen] for array in train)

            return batch

        def held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
            starts = range(0, len(held[0]), batch_size)[:n_batches]
            return (tuple(array[at : at + batch_size] for array in held) for at in starts)

        return cls(*setup), Data(
            batches=batches, held_out=held_out, row_tokens=2 * ids.shape[-1], epoch_rows=n,
            held_out_rows=float(len(held[0])), n_examples=n, n_held_out=len(held[0]),
            description={
                "examples": f"{n:,} pairs; {len(held[0]):,} more to validate on",
                "tokens": f"rows of up to {ids.shape[-1]:,}",
            },
        )  # fmt: skip

    def build(self) -> GPT:
        """Return a model; training begins with the weights of the start model."""
        return GPT(self.config)

    def loss(self, model: GPT, batch: Any) -> Tensor:
        """Return the mean loss, ()."""
        ids, targets, reference = batch
        return dpo_loss(reply_logprobs(model, ids, targets), reference).mean()

    def score(self, model: GPT, batches: Iterable[Arrays], autocast: Any) -> PreferenceScore:
        """Score pairs by their loss, and by the share of them that are preferred rightly."""

        def measure(batch: tuple[Tensor, ...]) -> list[float]:
            ids, targets, reference = batch
            policy = reply_logprobs(model, ids, targets)
            gains = (policy - reference).diff(dim=1)
            losses = dpo_loss(policy, reference)
            return [float(losses.sum()), float((gains < 0).sum()), len(losses)]

        loss, right, n = totals(model, batches, measure, autocast=autocast)
        return PreferenceScore(loss / n, right / n)

    def metrics(self, score: PreferenceScore) -> dict[str, float]:
        """Return the values for metrics.jsonl."""
        return {"val_loss": score.nats, "val_accuracy": score.accuracy}

    def describe(self, config: Any) -> str:
        """Return a description of the objective."""
        return "preferred replies against rejected ones"


if __name__ == "__main__":
    print(__doc__)
