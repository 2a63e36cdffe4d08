"""A head and an objective of your own: tag each word of a sentence as a person, place or time.

The trainer provides checkpoints, resuming, evaluation and metrics; you provide a head, data and a
score. Stop it with Ctrl-C and run it again: it resumes. transformers loads the result as
GPT2ForTokenClassification.

    python examples/own_task.py [STEPS]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.heads import Head, pad
from tiedgpt.train import Trainer
from tiedgpt.train.events import Ended, Evaluated
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.labelled import LabelScore
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Task

TAGS = ["O", "PERSON", "PLACE", "TIME"]
WORDS = {  # April, June and Paris have two tags: the words before them decide
    "PERSON": ["Ada", "Ben", "April", "June", "Paris"],
    "PLACE": ["Rome", "Paris", "Oslo"],
    "TIME": ["April", "June", "summer"],
}
SENTENCES = [
    "PERSON met PERSON in PLACE",
    "PERSON will go to PLACE during TIME",
    "during TIME both PERSON and PERSON stay in PLACE",
]


class Tagger(Head):
    """One tag for each token, which sees itself and the tokens before it."""

    architecture = "ForTokenClassification"  # transformers' class, without the family's name
    head_tensors = ("classifier.weight", "classifier.bias")

    def __init__(self, gpt: GPT) -> None:
        super().__init__(gpt)
        self.classifier = nn.Linear(gpt.config.n_embd, len(TAGS))

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, T) -> logits (B, T, N), one for each tag."""
        return self.classifier(self.gpt.body(ids))

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, T), tags (B, T) -> the mean cross-entropy; a tag of -100 is not counted."""
        ids, tags = batch
        return (F.cross_entropy(self(ids).transpose(1, 2), tags),)

    def config_entries(self) -> dict[str, Any]:
        """Return the head's entries in config.json."""
        return {"id2label": {str(n): tag for n, tag in enumerate(TAGS)}}


class Tagging(Task):
    """Train a Tagger; `Tagging(TrainOptions(start="gpt2"))` begins with the weights of GPT-2."""

    keeps_head = False

    def build(self, config: GPTConfig, data: Data) -> Tagger:
        """Return a fresh model."""
        return Tagger(GPT(config))

    def measure(self, model: Tagger, data: Data, batch: tuple[Tensor, ...]) -> list[float]:
        """Return the loss, the number of right tags, and the number of tags."""
        ids, tags = batch
        counted = tags != -100
        right, n = (model(ids).argmax(-1) == tags)[counted].sum(), counted.sum()
        return [float(model.loss(ids, tags) * n), float(right), float(n)]

    def score(self, data: Data, sums: list[float]) -> LabelScore:
        """Return the mean loss and the share of right tags."""
        loss, right, n = sums
        return LabelScore(loss / n, right / n)


def make_batch(tokenizer: Tokenizer, seed: tuple[int, ...], n: int) -> Arrays:
    """Return ids and tags (n, T); a tag stands at the last token of its word, the rest are -100."""
    random = np.random.default_rng(seed)
    rows, tags = [], []
    for _ in range(n):
        ids: list[int] = []
        row: list[int] = []
        for slot in random.choice(SENTENCES).split():
            word = tokenizer.encode(random.choice(WORDS[slot]) if slot in WORDS else slot)
            ids += word + tokenizer.encode(" ")
            row += [-100] * (len(word) - 1) + [TAGS.index(slot) if slot in WORDS else 0, -100]
        rows.append(ids)
        tags.append(row)
    return pad(rows)[0].numpy(), pad(tags, pad_id=-100)[0].numpy()


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    steps = int(sys.argv[1]) if sys.argv[1:] else 300
    tokenizer = Tokenizer.characters(
        SENTENCES + [word for words in WORDS.values() for word in words]
    )
    config = GPTConfig(
        vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=2,
        embd_pdrop=0, attn_pdrop=0, resid_pdrop=0,
    )  # fmt: skip
    plan = Plan(
        steps=steps, batch_size=16, micro_batch=16, optimizer="muon", lr=1e-2, warmup=steps // 20,
        weight_decay=0.1, grad_clip=1.0, dtype="fp32", seed=0, eval_every=max(1, steps // 5),
        eval_batches=1, save_every=max(1, steps // 5),
    )  # fmt: skip
    directory = RunDirectory(Path("runs/tagger"))
    directory.path.mkdir(parents=True, exist_ok=True)
    data = Data(  # the batch of a step is a pure function of the seed and the step
        batches=lambda n, seed: lambda step: make_batch(tokenizer, (seed, step), n),
        held_out=lambda n, n_batches: [make_batch(tokenizer, (10**9,), 64)],
        tokenizer=tokenizer,
        unit="sentences",
    )
    for event in Trainer(Tagging(), data, Run(directory, config, plan)).run():
        if isinstance(event, (Evaluated, Ended)) and event.score is not None:
            loss, accuracy = event.score.nats, event.score.accuracy
            print(f"step {event.step:>5}  loss {loss:.4f}  accuracy {accuracy:.0%}")
    print(f"saved in {directory.model}")
