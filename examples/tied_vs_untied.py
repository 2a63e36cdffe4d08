"""Train tied and untied GPTs on the same batches, and compare them over several seeds.

Three models for each seed: a tied GPT, the same GPT untied (its head begins as a copy of W, so both
compute the same function before the first step), and an untied GPT that is narrower, with as many
parameters as the tied one. The same command resumes after an interruption. The models are in
runs/tied-vs-untied, with a figure of the losses, the norms of W's rows and the two gradients of W.

    python examples/tied_vs_untied.py [STEPS [FILE ...]]

600 steps take about ten minutes on two cores. Without a FILE, the text is Python's documentation.
The figure needs tiedgpt[plot].
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.data import (
    Batches,
    Shards,
    documents,
    encode_corpus,
    in_order,
    plan_split,
    python_documentation,
)
from tiedgpt.evaluate.intervals import ratio_interval
from tiedgpt.evaluate.perplexity import measure_text
from tiedgpt.inspect import gradient_split
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Line, Panel
from tiedgpt.tie import untie
from tiedgpt.train import Trainer
from tiedgpt.train.events import Evaluated
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.metrics import read_history
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Score, Task

OUT = Path("runs/tied-vs-untied")
SEEDS = 0, 1, 2
MODELS = "tied", "untied", "untied, of equal size"
BATCH, CONTEXT, GROUPS = 16, 128, 10


@dataclass(frozen=True)
class Comparison(Score):
    """A validation loss, and how much of W's gradient comes from predicting."""

    predict_share: float


class CompareTie(Task):
    """Language modelling on prepared shards, with a tied or an untied model."""

    def build(self, config: GPTConfig, data: Data) -> GPT:
        """Return a fresh model; untied, it begins as a copy of the tied one."""
        gpt = GPT(replace(config, tie_word_embeddings=True))
        if not config.tie_word_embeddings:
            untie(gpt)
        return gpt

    def measure(self, model: GPT, data: Data, batch: tuple[torch.Tensor, ...]) -> list[float]:
        """Return the loss and the tokens, and for a window the share of W's gradient."""
        nats, n, _ = measure_text(model, batch, data.byte_lengths)
        split = gradient_split(model, None, batch[0][0])
        return [nats, n, split.norm_predict / (split.norm_read + split.norm_predict), 1]

    def score(self, data: Data, sums: Sequence[float]) -> Comparison:
        """Return the mean loss of a token, and the mean share of the windows."""
        nats, tokens, share, windows = sums
        return Comparison(nats / tokens, share / windows)


def prepare_text(files: list[str]) -> Tokenizer:
    """Encode the text into shards, once; return the tokenizer."""
    if (OUT / "data").exists():
        return Tokenizer.from_pretrained(OUT / "tokenizer")
    split = plan_split(documents(files) if files else python_documentation())
    size = max(300, min(2048, split.characters // 500))
    tokenizer = Tokenizer.train((part.text for side, part in split if side == "train"), size)
    tokenizer.save_pretrained(OUT / "tokenizer")
    encode_corpus(split, tokenizer, OUT / "data")
    return tokenizer


def open_data(tokenizer: Tokenizer) -> Data:
    """Return the text as rows; the batch of a step is a pure function of the seed and the step."""
    train, val = (Shards.in_directory(OUT / "data", side) for side in ("train", "val"))

    def held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
        rows = None if n_batches is None else n_batches * batch_size
        return in_order(val, batch_size=batch_size, n_positions=CONTEXT, at_most=rows)

    return Data(
        batches=lambda n, seed: Batches(train, batch_size=n, n_positions=CONTEXT, seed=seed).batch,
        held_out=held_out,
        tokenizer=tokenizer,
        unit="tokens",
        row_units=CONTEXT,
        row_tokens=CONTEXT,
    )


def configs(tokenizer: Tokenizer) -> dict[str, GPTConfig]:
    """Return the shape of each model; the last has as many parameters as the first."""
    end = tokenizer.eos_token_id
    tied = GPTConfig(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=3,
        embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    untied = replace(tied, tie_word_embeddings=False)
    shapes = [replace(untied, n_embd=width) for width in range(3, 97, 3)]

    def missing(config: GPTConfig) -> int:
        return tied.parameter_count() - config.parameter_count()

    narrow = min(shapes, key=lambda config: abs(missing(config)))
    more = round(missing(narrow) / (narrow.n_layer * (2 * narrow.n_embd + 1)))
    equal = replace(narrow, n_inner=narrow.inner_dim + more)
    return dict(zip(MODELS, (tied, untied, equal), strict=True))


def train(name: str, config: GPTConfig, tokenizer: Tokenizer, seed: int, steps: int) -> Path:
    """Train a model, or go on with it; return its run."""
    run = RunDirectory(OUT / f"{name.replace(', ', '-').replace(' ', '-')}-seed-{seed}-{steps}")
    run.path.mkdir(parents=True, exist_ok=True)
    often = max(1, steps // 12)
    plan = Plan(
        steps=steps, batch_size=BATCH, micro_batch=BATCH, optimizer="adamw", lr=5e-3,
        warmup=max(1, steps // 4), weight_decay=0.0, grad_clip=1.0, dtype="fp32", seed=seed,
        eval_every=often, eval_batches=4, save_every=often, keep="last",
    )  # fmt: skip
    data = open_data(tokenizer)
    for event in Trainer(CompareTie(), data, Run(run, config, plan)).run():
        if isinstance(event, Evaluated):
            print(f"{run.path.name}  step {event.step:>5}  loss {event.score.nats:.4f}", flush=True)
    return run.path


def spread(values: np.ndarray) -> str:
    """Return the mean over the seeds, with its 95 % interval."""
    low, high = ratio_interval(values, np.ones(len(values)))
    return f"{values.mean():+.4f} (95 %: {low:+.4f} to {high:+.4f})"


def lines(xs: Any, series: dict[str, np.ndarray]) -> tuple[Line, ...]:
    """Return a line with its interval for each series (seeds, places)."""
    made = []
    for color, (name, values) in enumerate(series.items()):
        intervals = [ratio_interval(column, np.ones(len(column))) for column in values.T]
        low, high = zip(*intervals, strict=True)
        made.append(Line(name, xs, values.mean(0), color, marked=True, low=low, high=high))
    return tuple(made)


def norms_by_frequency(run: Path, counts: np.ndarray) -> dict[str, list[float]]:
    """Return the mean norm of centred rows of each matrix, in ten groups of tokens by frequency."""
    model = GPT.from_pretrained(run / "model")
    rows = {"reads": model.wte.weight}
    if model.head is not None:
        rows["predicts"] = model.head.weight
    groups = np.array_split(np.argsort(-counts)[: (counts > 0).sum()], GROUPS)
    centred = {name: (w - w.mean(0)).norm(dim=1).detach().numpy() for name, w in rows.items()}
    return {name: [norm[group].mean() for group in groups] for name, norm in centred.items()}


def main(steps: int, files: list[str]) -> None:
    """Train everything, print the comparison and draw the figure."""
    tokenizer = prepare_text(files)
    shapes = configs(tokenizer)
    runs = {
        name: [train(name, config, tokenizer, seed, steps) for seed in SEEDS]
        for name, config in shapes.items()
    }
    histories = {name: [read_history(run) for run in paths] for name, paths in runs.items()}
    axis = histories["tied"][0].series("val_loss", "steps")[0]

    def curves(key: str) -> dict[str, np.ndarray]:
        return {
            name: np.array([history.series(key, "steps")[1] for history in each])
            for name, each in histories.items()
        }

    losses = curves("val_loss")
    print("\nloss of the tied GPT, and of the others minus that of the same seed, in nats a token")
    for name, values in losses.items():
        final = values[:, -1] if name == "tied" else values[:, -1] - losses["tied"][:, -1]
        print(f"{name:<22} {shapes[name].parameter_count():>9,} parameters  {spread(final)}")
    train_side = Shards.in_directory(OUT / "data", "train")
    counts = np.bincount(train_side.read(0, len(train_side)), minlength=len(tokenizer))
    norms: dict[str, list[list[float]]] = {}
    for name in MODELS[:2]:
        for run in runs[name]:
            for use, means in norms_by_frequency(run, counts).items():
                norms.setdefault(f"{name}: {use}", []).append(means)
    less = {name: values - losses["tied"] for name, values in losses.items()}
    by_group = {name: np.array(values) for name, values in norms.items()}
    panels = [
        Panel("validation loss, nats", "step", lines(axis, losses)),
        Panel("loss less the tied GPT's", "step", lines(axis, less)),
        Panel("share of W's gradient from predicting", "step",
              lines(axis, curves("val_predict_share"))),
        Panel("norm of centred rows", "tokens by frequency, most frequent first",
              lines(range(1, GROUPS + 1), by_group)),
    ]  # fmt: skip
    save_figure(panels, OUT / "comparison.svg", "mean and 95 % interval over the seeds")
    print(f"figure: {OUT / 'comparison.svg'}")


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    main(int(sys.argv[1]) if sys.argv[1:] else 600, sys.argv[2:])
