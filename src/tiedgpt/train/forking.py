"""A run that begins where another one stands, under other options: `--fork RUN`.

The model's shape, its tokenizer and its weights are RUN's, and so is the optimizer's state, for
each parameter that goes by the same rule as there. The steps, the schedule of the rate, the order
of the data and the random stream begin anew. RUN itself is only read, and no longer needed once
the fork has its own first checkpoint, that of step 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.checkpoint import checkpoints, load_moments, load_weights, step_of, verify
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.plan import Plan, recorded
from tiedgpt.train.run_directory import RunDirectory


@dataclass(frozen=True)
class Forked:
    """The run that another one begins from."""

    run: RunDirectory
    tables: dict[str, Any]
    """Its run.toml."""
    config_there: GPTConfig
    plan_there: Plan

    @classmethod
    def open(cls, source: str) -> Forked:
        """Read a run's record; `UserError` where there is no run with a checkpoint."""
        run = RunDirectory(Path(source))
        tables = run.read_record()
        if not tables or not checkpoints(run.checkpoints):
            raise UserError(
                f"--fork {source}: no run with a checkpoint is there; give the --out of a run, or "
                "a model's directory to --start"
            )
        return cls(run, tables, *recorded(tables))

    def resolve(self, options: TrainOptions) -> TrainOptions:
        """Return the options with the run's own shape and numbers where none were given.

        Raises `UserError` for options that ask for another model than the run has.
        """
        there = self.tables.get("options", {})
        fresh = TrainOptions()
        if options.task != there.get("task", fresh.task):
            raise UserError(
                f"--fork {self.run.path} is of --task {there.get('task', fresh.task)}: to put "
                f"another head on its body, give --start {self.run.model}"
            )
        for name in ("size", "width", "vocab_size", "tokenizer", "window", "bias"):
            given, default = getattr(options, name), getattr(fresh, name)
            if given not in (default, there.get(name, default)):
                raise UserError(
                    f"--{name.replace('_', '-')} {given} is for a fresh model: {self.run.path} "
                    "has its own"
                )
        context = options.context or there.get("context")
        if context is not None and context > self.config_there.n_positions:
            raise UserError(
                f"--context {context}: {self.run.path} has {self.config_there.n_positions} "
                "positions"
            )
        same_rule = options.optimizer == "auto"
        return replace(
            options,
            size=there.get("size", fresh.size),
            width=None,
            vocab_size=None,
            tokenizer=fresh.tokenizer,
            context=context,
            lr=options.lr or self.plan_there.lr,
            batch_size=options.batch_size or self.plan_there.batch_size,
            optimizer=self.plan_there.optimizer if same_rule else options.optimizer,
        )

    def table(self, options: TrainOptions) -> dict[str, dict[str, Any]]:
        """Return the table of run.toml that tells of it; `options` are the resolved ones."""
        newest = checkpoints(self.run.checkpoints)[-1]
        there = {"run": str(self.run.path.resolve()), "step": step_of(newest)}
        return {"fork": there | {"context": options.context}}

    def config(self, dropout: float | None) -> GPTConfig:
        """Return its newest model's config, with this dropout everywhere unless None."""
        newest = step_of(checkpoints(self.run.checkpoints)[-1])
        config = self.config_there
        if self.plan_there.untied(newest):
            config = replace(config, tie_word_embeddings=False)
        if dropout is None:
            return config
        return replace(config, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout)

    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer."""
        return Tokenizer.from_pretrained(self.run.tokenizer)

    def require_labels(self, labels: Sequence[str]) -> None:
        """Raise `UserError` where its head scores other labels than these."""
        there = self.tables.get("train_examples", {}).get("labels", [])
        if list(labels) != there:
            raise UserError(
                f"--fork {self.run.path} scores the labels {', '.join(there) or 'of none'} and the "
                f"examples have {', '.join(labels)}: give --start {self.run.model}"
            )


def fork_options(options: TrainOptions, tables: dict[str, Any]) -> TrainOptions:
    """Return a fork's options, resolved from the run it begins from or from its own run.toml."""
    if tables:
        return replace(options, context=tables.get("fork", {}).get("context", options.context))
    return Forked.open(str(options.fork)).resolve(options)


def adopt(
    directory: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[str]:
    """Put the newest good checkpoint of another run into the model and its optimizers; say so.

    The directory is only read. Moments of a parameter that goes by another rule now are left out.
    """
    damaged: list[str] = []
    for path in reversed(checkpoints(directory)):
        try:
            verify(path)
            load_weights(directory, step_of(path), model)
            kept = load_moments(path, model, optimizers)
        except CorruptInputError as error:
            damaged.append(f"passed over a damaged checkpoint: {error}")
            continue
        total = sum(1 for _ in model.parameters())
        state = f"the optimizer's state of {kept} of {total} parameters"
        return [*damaged, f"begins with {path}: its weights, and {state}"]
    raise CorruptInputError(
        f"{directory} holds no good checkpoint to begin with{f' ({damaged[0]})' if damaged else ''}"
    )
