"""Distillation: train a small GPT on a text and on a larger GPT's predictions for it.

    python examples/distil.py [TEACHER TEXT] [STEPS]

The default teacher is the model of `small_model.py`; the student has a quarter of its width and
the same tokenizer. The student is trained twice on the same batches, without and with the teacher.

The loss is a tenth of the text's loss plus nine tenths of the mean cross-entropy of the student's
probabilities to the teacher's (Hinton et al. 2015, arXiv 1503.02531, at temperature 1). Each step
adds the teacher's forward pass. docs/measurements.md has the results.
"""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from small_model import small_model
from tiedgpt import GPT
from tiedgpt.runtime import find_device
from tiedgpt.train import Trainer, TrainOptions, fast_training
from tiedgpt.train.events import Ended
from tiedgpt.train.objectives.language import LanguageModelling
from tiedgpt.train.run import make_plan, prepare_fresh
from tiedgpt.train.storage import RunDirectory

SHARE = 0.9
"""Share of the teacher in the loss."""


@dataclass(eq=False, kw_only=True)
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
    options = TrainOptions(data=(text,), tokenizer=teacher_run, size="nano", steps=int(steps))
    teacher = GPT.from_pretrained(Path(teacher_run) / "model").eval()
    options = replace(options, context=teacher.config.n_positions)
    for name in ("alone", "distilled"):
        run = RunDirectory(Path("runs") / name)
        run.path.mkdir(parents=True, exist_ok=True)
        objective, data = prepare_fresh(options, run)
        if not given:
            objective.config = replace(objective.config, n_embd=teacher.config.n_embd // 4)
        if name == "distilled":
            values = {field.name: getattr(objective, field.name) for field in fields(objective)}
            objective = Distilled(**values, teacher=teacher)
        plan = make_plan(options, objective, data, find_device())
        trainer = Trainer(run, objective, data, plan, find_device(), accelerate=fast_training)
        for event in trainer.run():
            if isinstance(event, Ended):
                print(f"{name:<10} {event.score.nats:.4f} nats a token on held-out text")
