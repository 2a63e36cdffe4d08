"""What a run begins with: its tokenizer, its data, its objective, and the model it starts from.

`prepare` makes them once. A model to `--start` from gives its shape, its tokenizer and its weights.
A run to `--fork` gives the optimizer's state as well, for each parameter that goes by the same rule
as there: the steps, the schedule of the rate, the order of the data and the random stream begin
anew. Both are only read, and no longer needed once the run has its own first checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.data.prepare import TOKENIZER_CHARACTERS
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.checkpoint import list_checkpoints, read_step
from tiedgpt.train.objective import Basis, Pair, Pretrained, Progress, Sources
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.storage import RunDirectory, read_plan
from tiedgpt.train.tune_options import AnyOptions, TuneOptions
from tiedgpt.tune.freezing import moving


class ParentRun:
    """The run that another one begins from, as it stands at its newest checkpoint.

    Raises `UserError` where there is no run with a checkpoint.
    """

    def __init__(self, source: str) -> None:
        self.run = RunDirectory(Path(source))
        self.tables = self.run.read_record()
        found = list_checkpoints(self.run.checkpoints)
        if not self.tables or not found:
            raise UserError(
                f"--fork {source}: no run with a checkpoint is there",
                hint="give the --out of a run, or a model's directory to --start",
            )
        self.config, self.plan = read_plan(self.tables)
        self.step = read_step(found[-1])
        if self.plan.is_untied(self.step):
            self.config = replace(self.config, tie_word_embeddings=False)

    def require_labels(self, labels: Sequence[str]) -> None:
        """Raise `UserError` where its head scores other labels than these."""
        there = self.tables.get("train_examples", {}).get("labels", [])
        if list(labels) != there:
            raise UserError(
                f"--fork {self.run.path} scores the labels {', '.join(there) or 'of none'} and "
                f"the examples have {', '.join(labels)}",
                hint=f"give --start {self.run.model}",
            )


def fork_options(options: AnyOptions, tables: dict[str, Any]) -> AnyOptions:
    """Return the options, of a fork with its run's numbers where none were given.

    `tables` are the fork's own run.toml, {} before there is one. Raises `UserError` for a --task
    of which the run is not.
    """
    if options.fork is None:
        return options
    if tables:
        return replace(options, context=tables.get("fork", {}).get("context", options.context))
    forked = ParentRun(options.fork)
    plan, there = forked.plan, {"task": "lm", "context": None} | forked.tables.get("options", {})
    if options.task != there["task"]:
        raise UserError(
            f"--fork {forked.run.path} is of --task {there['task']}: to put another head on its "
            f"body, give --start {forked.run.model}"
        )
    own_rule = options.optimizer == "auto"
    return replace(
        options,
        context=options.context or there["context"],
        lr=options.lr or plan.lr,
        batch_size=options.batch_size or plan.batch_size,
        optimizer=plan.optimizer if own_rule else options.optimizer,
        weight_decay=plan.weight_decay if options.weight_decay is None else options.weight_decay,
    )


def _configure_start(config: GPTConfig, options: AnyOptions) -> GPTConfig:
    """Return the config of the model to begin with, with the dropout that was asked for."""
    dropout = options.start_dropout if isinstance(options, TuneOptions) else options.dropout
    if options.context is not None and options.context > config.n_positions:
        raise UserError(
            f"--context {options.context}: {options.start or options.fork} has "
            f"{config.n_positions} positions"
        )
    if dropout is None:
        return config
    # with dropout, attention loses its fast kernels
    return replace(config, embd_pdrop=dropout, attn_pdrop=0.0, resid_pdrop=dropout)


def prepare(
    run: RunDirectory,
    options: AnyOptions,
    sources: Sources,
    config: GPTConfig | None = None,
    progress: Progress | None = None,
) -> Pair:
    """Return what a run trains, and on what, with the tokenizer made now or by an earlier call.

    `config` is the one that run.toml has. Raises `UserError` for what cannot be trained.
    """
    start = forked = None
    if options.start is not None:
        start = sources.start or Pretrained(options.start, keep_head=sources.keeps_head)
    if config is None and start is not None:
        config = _configure_start(start.gpt.config, options)
    elif config is None and options.fork is not None:
        forked = ParentRun(options.fork)
        config = _configure_start(forked.config, options)
        forked.require_labels(sources.labels)
    if sources.is_encoded(run):
        if not run.tokenizer.is_dir():
            raise CorruptInputError(
                f"{run.tokenizer} is missing: without it the run cannot resume",
                hint="train in another --out",
            )
        tokenizer = Tokenizer.from_pretrained(run.tokenizer)
    else:
        own = options.start if forked is None else forked.run.tokenizer
        tokenizer = sources.tokenizer or make_tokenizer(options, sources, config, own)
        tokenizer.save_pretrained(run.tokenizer)
        sources.encode(tokenizer, run, progress)
    if config is None:
        assert isinstance(options, TrainOptions)
        config = options.model_config(
            vocab_size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
        )
    basis = Basis(config, tokenizer, start, options.freeze or "")
    objective, data = sources.make(run, options, basis)
    if forked is not None:
        there = {"run": str(forked.run.path.resolve()), "step": forked.step}
        fork = there | {"context": options.context}
        data = replace(data, counts={**data.counts, "fork": fork})
    is_partial = options.freeze or (isinstance(options, TuneOptions) and options.lora)
    if not is_partial or options.chooses:
        return objective, data
    with torch.device("meta"):
        moves = moving(objective.build())
    data = replace(data, notes=[*data.notes, str(moves)])
    return replace(objective, n_trained=moves.moving), data


def make_tokenizer(
    options: AnyOptions, sources: Sources, config: GPTConfig | None, own: str | Path | None
) -> Tokenizer:
    """Return the tokenizer asked for, that of the model to begin with (`own`), or a new BPE."""
    source = own if options.tokenizer == "bpe" else options.tokenizer
    train, whole = sources.texts()
    if source == "char":
        tokenizer = Tokenizer.characters(whole)
    elif source is None:
        assert isinstance(options, TrainOptions)
        size = sources.vocabulary_size(options)
        tokenizer = Tokenizer.train(_take(train, TOKENIZER_CHARACTERS), size)
    else:
        tokenizer = Tokenizer.from_pretrained(source)
    if config is not None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model {config.vocab_size:,}: "
            "they do not belong together",
            hint="give --tokenizer",
        )
    return tokenizer


def _take(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
