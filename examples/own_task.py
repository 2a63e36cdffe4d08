"""Your own objective for the Trainer: a GPT that learns to add, scored by exact answers.

The trainer provides checkpoints, resuming, evaluation and metrics; you provide data and score. Stop
it with Ctrl-C and run it again: it resumes.

    python examples/own_task.py [STEPS]
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.train import Trainer
from tiedgpt.train.events import Ended, Evaluated
from tiedgpt.train.objective import Arrays, Data, Objective
from tiedgpt.train.plan import Plan
from tiedgpt.train.storage import RunDirectory

LENGTH = len("12+34=046")


@dataclass
class Score:
    """The result of an evaluation."""

    nats: float
    right: float


class Addition(Objective):
    """Two numbers below 100 and their sum, written backwards; only the answer is trained."""

    def build(self) -> GPT:
        """Return a fresh model."""
        return GPT(self.config)

    @torch.no_grad()
    def score(self, model: GPT, batches: Iterable[Arrays], autocast: Any) -> Score:
        """Score sums by their loss, and by how many are right in all digits."""
        model.eval()
        losses, right = [], []
        for ids, targets in (map(torch.from_numpy, batch) for batch in batches):
            written = model(ids).argmax(-1)
            losses.append(float(model.loss(ids, targets)))
            right.append(float((written == targets)[:, LENGTH - 4 :].all(1).float().mean()))
        model.train()
        return Score(float(np.mean(losses)), float(np.mean(right)))

    def metrics(self, score: Score) -> dict[str, float]:
        """Return the values for metrics.jsonl."""
        return {"val_loss": score.nats, "val_right": score.right}


def sums(tokenizer: Tokenizer, seed: tuple[int, ...], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and targets (n, T); a target of -100 is not counted."""
    pairs = np.random.default_rng(seed).integers(0, 100, (n, 2))
    texts = [f"{a:02}+{b:02}={f'{a + b:03}'[::-1]}" for a, b in pairs]
    ids = np.array([tokenizer.encode(text) for text in texts])
    targets = ids[:, 1:].copy()
    targets[:, : LENGTH - 4] = -100  # the part before the answer
    return ids[:, :-1], targets


if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 600
    tokenizer = Tokenizer.characters(["0123456789+="])
    config = GPTConfig(
        vocab_size=len(tokenizer), n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
        embd_pdrop=0, attn_pdrop=0, resid_pdrop=0,
    )  # fmt: skip
    plan = Plan(
        steps=steps, batch_size=64, micro_batch=64, optimizer="muon", lr=1e-2, warmup=steps // 20,
        weight_decay=0.1, grad_clip=1.0, dtype="fp32", seed=0, eval_every=max(1, steps // 5),
        eval_batches=1, save_every=max(1, steps // 5),
    )  # fmt: skip
    run = RunDirectory(Path("runs/addition"))
    run.path.mkdir(parents=True, exist_ok=True)
    data = Data(  # the batch of a step is a pure function of the seed and the step
        batches=lambda n, seed: lambda step: sums(tokenizer, (seed, step), n),
        held_out=lambda n, n_batches: [sums(tokenizer, (10**9,), 256)],
        unit="sums",
    )
    trainer = Trainer(run, Addition(config, tokenizer), data, plan, torch.device("cpu"))
    for event in trainer.run():
        if isinstance(event, (Evaluated, Ended)) and event.score is not None:
            print(
                f"step {event.step:>5}  loss {event.score.nats:.4f}  right {event.score.right:.0%}"
            )
    print(f"saved in {run.model}")
