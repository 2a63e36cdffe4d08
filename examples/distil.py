"""Distillation: train a small GPT on a text and on a larger GPT's predictions for it.

    python examples/distil.py [TEACHER TEXT] [STEPS]

The default teacher is the model of `small_model.py`; the student has a quarter of its width and
the same tokenizer. The student is trained twice on the same batches, without and with the teacher.

The loss is a tenth of the text's loss plus nine tenths of the mean cross-entropy of the student's
probabilities to the teacher's (Hinton et al. 2015, arXiv 1503.02531, at temperature 1). Each step
adds the teacher's forward pass. docs/measurements.md has the results.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from small_model import small_model
from tiedgpt import GPT
from tiedgpt.train import Trainer, TrainOptions
from tiedgpt.train.dry_run import make_plan, prepare_fresh
from tiedgpt.train.events import Ended
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.language import LanguageModelling

SHARE = 0.9
"""Share of the teacher in the loss."""


class Distilled(LanguageModelling):
    """Predict the next token of a text as a teacher does."""

    teacher: GPT

    def loss(self, model: GPT, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the mixed loss (), in nats, of ids and targets (B, T)."""
        ids, targets = batch
        with torch.no_grad():
            expected = self.teacher(ids).softmax(-1)
        logits = model(ids)
        soft = -(expected * logits.log_softmax(-1)).sum(-1).mean()
        hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return SHARE * soft + (1 - SHARE) * hard


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    *given, steps = sys.argv[1:] if len(sys.argv) in (2, 4) else [*sys.argv[1:], "300"]
    teacher_run, text = given or (small_model(), "diary.txt")
    teacher = GPT.from_pretrained(Path(teacher_run) / "model").eval()
    options = TrainOptions(
        data=(text,), tokenizer=teacher_run, size="nano", steps=int(steps),
        context=teacher.config.n_positions,
    )  # fmt: skip
    Distilled.teacher = teacher
    for name, kind in {"alone": LanguageModelling, "distilled": Distilled}.items():
        task, directory = kind(options), RunDirectory(Path("runs") / name)
        prepared = prepare_fresh(task, directory)
        if not given:
            narrow = replace(prepared.config, n_embd=teacher.config.n_embd // 4)
            prepared = replace(prepared, config=narrow)
        run = Run(directory, prepared.config, make_plan(prepared))
        for event in Trainer(task, prepared.data(run.config), run).run():
            if isinstance(event, Ended):
                print(f"{name:<10} {event.score.nats:.4f} nats a token on held-out text")
