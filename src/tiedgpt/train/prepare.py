"""Prepare a run: its tokenizer, data, objective, and the model to start from.

`prepare` makes them once. A model to `--start` from gives its shape, its tokenizer and its weights.
It is only read, and no longer needed once the run has its own first checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.data.prepare import TOKENIZER_CHARACTERS
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Basis, Pair, Pretrained, Progress, Sources
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.storage import RunDirectory
from tiedgpt.tune.freezing import count_trainable


def _configure_start(config: GPTConfig, options: TrainOptions, memorizes: bool) -> GPTConfig:
    """Return the config of the model to begin with, with the dropout that was asked for."""
    if options.context is not None and options.context > config.n_positions:
        raise UserError(
            f"--context {options.context}: {options.start} has {config.n_positions} positions"
        )
    dropout = options.start_dropout(memorizes=memorizes)
    if dropout is None:
        return config
    # with dropout, attention loses its fast kernels
    return replace(config, embd_pdrop=dropout, attn_pdrop=0.0, resid_pdrop=dropout)


def prepare(
    run: RunDirectory,
    options: TrainOptions,
    sources: Sources,
    config: GPTConfig | None = None,
    progress: Progress | None = None,
) -> Pair:
    """Return the objective and the data of a run; train the tokenizer unless an earlier call did.

    `config` is the one that run.toml has. Raises `UserError` for what cannot be trained.
    """
    start = None
    if options.start is not None:
        start = sources.start or Pretrained(options.start, keep_head=sources.keeps_head)
    if config is None and start is not None:
        config = _configure_start(start.gpt.config, options, sources.memorizes)
    if sources.is_encoded(run):
        if not run.tokenizer.is_dir():
            raise CorruptInputError(
                f"{run.tokenizer} is missing: without it the run cannot resume",
                hint="train in another --out",
            )
        tokenizer = Tokenizer.from_pretrained(run.tokenizer)
    else:
        tokenizer = sources.tokenizer or make_tokenizer(options, sources, config)
        tokenizer.save_pretrained(run.tokenizer)
        sources.encode(tokenizer, run, progress)
    if config is None:
        config = options.model_config(
            vocab_size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
        )
    if (options.lora or 0) > config.n_embd:
        raise UserError(
            f"must be from 1 to the width {config.n_embd}, got {options.lora}", option="lora"
        )
    basis = Basis(config, tokenizer, start, options.freeze or "")
    objective, data = sources.make(run, options, basis)
    is_partial = options.freeze or options.lora
    if not is_partial or options.chooses:
        return objective, data
    with torch.device("meta"):
        trainable = count_trainable(objective.build())
    data = replace(data, notes=[*data.notes, str(trainable)])
    return replace(objective, n_trained=trainable.moving), data


def make_tokenizer(options: TrainOptions, sources: Sources, config: GPTConfig | None) -> Tokenizer:
    """Return the tokenizer of the options or of the model to start from, or train a new BPE."""
    source = options.start if options.tokenizer == "bpe" else options.tokenizer
    train, whole = sources.texts()
    if source == "char":
        tokenizer = Tokenizer.characters(whole)
    elif source is None:
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
