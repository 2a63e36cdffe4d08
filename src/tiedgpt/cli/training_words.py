"""What there is to say of a training run, in words: its model, its plan, its scores."""

from __future__ import annotations

from pathlib import Path

from tiedgpt.core.config import GPTConfig
from tiedgpt.evaluate.perplexity import Score
from tiedgpt.train.plan import Plan
from tiedgpt.train.tasks.labelled import Labelled, LabelScore
from tiedgpt.train.tasks.language import LanguageModelling

SHOWN_LABELS = 6


def changes(plan: Plan) -> str:
    """Return a line of what is otherwise in a run's first steps, or from one of them on; or ""."""
    growing = {"batches": plan.batch_warmup, "rows": plan.length_warmup}
    said = [f"{what} grow for {steps:,} steps" for what, steps in growing.items() if steps]
    said += [f"untied after {plan.untie_at:,} steps"] if plan.untie_at is not None else []
    return f"          {', '.join(said)}\n" if said else ""


def parameters(config: GPTConfig) -> str:
    """Return the parameter count and what it counts."""
    shape = f"{config.vocab_size:,} x {config.n_embd}"
    how = (
        f"one matrix of {shape} counted once: it reads and predicts"
        if config.tie_word_embeddings
        else f"a matrix of {shape} reads and another predicts"
    )
    return f"{config.parameter_count():,} parameters; {how}"


def units(task: LanguageModelling | Labelled) -> int:
    """Return the tokens, or the examples, of an epoch."""
    return len(task.train) if isinstance(task, Labelled) else task.encoded.train.tokens


def scored(score: object) -> str:
    """Return a score in words."""
    if isinstance(score, Score):
        return f"{score.nats:.3f} nats, {score.bits_per_byte:.3f} bits/byte"
    assert isinstance(score, LabelScore)
    return f"{score.nats:.3f} nats, {score.measure} {100 * score.share:.1f} %"


def labelled(names: tuple[str, ...]) -> str:
    """Return how many labels there are, and the first of them; or ""."""
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN_LABELS]) + (", ..." if len(names) > SHOWN_LABELS else "")
    return f"; {len(names)} labels: {shown}"


def next_steps(task: Labelled, model: Path) -> str:
    """Return how the head is used, in Python."""
    head = task.head_class
    theirs = head.class_in_transformers(task.config)
    loads = f", which transformers loads too, as {theirs}" if theirs else ""
    names = (head.__name__, *(name for name in ("best_spans", "pad") if name in task.use))
    return (
        f"saved in {model}{loads}\n\nnext, in Python:\n"
        "  from tiedgpt import Tokenizer\n"
        f"  from tiedgpt.heads import {', '.join(names)}\n"
        f"  head = {head.__name__}.from_pretrained({str(model)!r})\n"
        f"  tokenizer = Tokenizer.from_pretrained({str(model)!r})\n"
        f"  {task.use}"
    )
