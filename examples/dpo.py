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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.core.loss import IGNORED
from tiedgpt.errors import UserError
from tiedgpt.heads import pad
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.tasks.labelled import LabelScore
from tiedgpt.train.tasks.rows import Data, Rows, Sources, example_data
from tiedgpt.train.tasks.task import Task

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
    """Lines with a prompt, a preferred reply and a rejected one, for a reference model."""

    def __init__(self, paths: Iterable[str], reference: GPT) -> None:
        lines = [line for path in paths for line in Path(path).read_text().splitlines()]
        self.pairs, self.reference = [json.loads(line) for line in lines], reference
        if len(self.pairs) < 2:
            raise UserError(f"{len(self.pairs)} pairs are too few to hold one out")

    def digest(self) -> str:
        """Return the sha256 of all pairs."""
        return hashlib.sha256(json.dumps(self.pairs).encode()).hexdigest()

    def rows(self, tokenizer: Tokenizer, directory: Path) -> PairRows:
        """Return the pairs as ids."""
        return PairRows(self, tokenizer)


class PairRows(Rows):
    """Pairs as ids, with the reference's log-probabilities."""

    def __init__(self, sources: Pairs, tokenizer: Tokenizer) -> None:
        self.pairs, self.model, self.tokenizer = sources.pairs, sources.reference, tokenizer

    def at(self, context: int) -> Data:
        """Return batches of ids, targets (B, 2, T), and reference (B, 2)."""
        ids, targets = self._encode(context)
        with torch.no_grad():
            pieces = zip(ids.split(8), targets.split(8), strict=True)
            reference = torch.cat([reply_logprobs(self.model, *piece) for piece in pieces])
        arrays = ids.numpy(), targets.numpy(), reference.numpy()

        def collate(chosen: Sequence[int]) -> Arrays:
            return tuple(array[[*chosen]] for array in arrays)

        n_held_out = max(1, len(ids) // PAIRS_PER_HELD_OUT)
        train, held_out = range(n_held_out, len(ids)), range(n_held_out)
        texts = {"examples": f"{len(train):,} pairs; {n_held_out:,} more to validate on"}
        return example_data(
            train, held_out, collate, row_tokens=2 * ids.shape[-1], tokenizer=self.tokenizer,
            description=texts | {"tokens": f"rows of up to {ids.shape[-1]:,}"},
        )  # fmt: skip

    def _encode(self, context: int) -> tuple[Tensor, Tensor]:
        """Return ids and targets (N, 2, T); only the tokens of replies are targets."""
        ids, targets = [], []
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        for pair in self.pairs:
            prompt = self.tokenizer.encode(pair["prompt"])
            for name in ("chosen", "rejected"):
                row = [*prompt, *self.tokenizer.encode(pair[name]), *end][: context + 1]
                ids.append(row[:-1])
                targets.append([IGNORED] * (len(prompt) - 1) + row[len(prompt) :])
        shape = len(self.pairs), 2, -1
        return pad(ids)[0].view(shape), pad(targets, pad_id=IGNORED)[0].view(shape)


class Preferences(Task):
    """Prefer the chosen reply; a batch is ids, targets (B, 2, T), and reference (B, 2)."""

    def read(self) -> Pairs:
        """Read the pairs of the options."""
        if self.start is None:
            raise UserError("DPO needs a model to start from", hint="give --start MODEL")
        return Pairs(self.options.data, self.start.gpt.eval())

    def build(self, config: GPTConfig, data: Data) -> GPT:
        """Return a model; training begins with the weights of the start model."""
        return GPT(config)

    def loss(self, model: GPT, batch: Any) -> Tensor:
        """Return the mean loss, ()."""
        ids, targets, reference = batch
        return dpo_loss(reply_logprobs(model, ids, targets), reference).mean()

    def measure(self, model: GPT, data: Data, batch: tuple[Tensor, ...]) -> list[float]:
        """Return the sum of losses, the number of right pairs, and the number of pairs."""
        ids, targets, reference = batch
        policy = reply_logprobs(model, ids, targets)
        right = ((policy - reference).diff(dim=1) < 0).sum()
        return [float(dpo_loss(policy, reference).sum()), float(right), len(ids)]

    def score(self, data: Data, sums: Sequence[float]) -> LabelScore:
        """Return the mean loss, and the share of pairs whose preferred reply gained."""
        loss, right, n = sums
        return LabelScore(loss / n, right / n)


if __name__ == "__main__":
    print(__doc__)
