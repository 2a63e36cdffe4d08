"""The data of a run: documents read once, a tokenizer, and rows to train on.

    sources = objective_class.open(options)  # reads the documents
    objective, data = prepare(objective_class, sources, directory, options)

`prepare` makes the tokenizer and encodes the sources in the run's directory. `Data` holds the rows
and the numbers about them that a plan depends on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.data.prepare import TOKENIZER_CHARACTERS
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Arrays, ModelSetup, Objective, Pretrained
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.planning import Facts

if TYPE_CHECKING:
    from tiedgpt.train.storage import RunDirectory

Progress = Callable[[int, int], None]
"""Function of the number of encoded characters and their total."""


@dataclass(frozen=True, kw_only=True)
class Data(Facts):
    """The rows to train on and to validate on, with the numbers that a plan depends on."""

    batches: Callable[[int, int], Callable[[int], Arrays]]
    """Function of (batch size, seed) that returns the batch of each step, from 0."""
    held_out: Callable[[int, int | None], Iterable[Arrays]]
    """Function of (batch size, number of batches) that returns held-out batches; None: all."""
    counts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Tables of run.toml with the sizes of the data."""
    description: dict[str, str] = field(default_factory=dict)
    """Sentences about the data by a short name."""
    notes: Sequence[str] = ()
    """Facts about the data that the user should know."""


class Sources(ABC):
    """The data of a run before they are encoded; `Objective.make` makes rows of them."""

    tokenizer: Tokenizer | None = None
    """The tokenizer that the data require, if any."""
    start: Pretrained | None = None
    """The model to start from, if the data need rows for new tokens."""
    memorizes: bool = False
    """Whether the examples are so few that they are memorized, because none is held out."""

    @abstractmethod
    def digest(self) -> str:
        """Return a sha256 of all data, which detects changed data."""

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the training texts, and all texts, to train a tokenizer on."""
        return (), ()

    def vocabulary_size(self, options: TrainOptions) -> int:
        """Return the size of the vocabulary to train on the texts."""
        return options.vocab_size or options.shape.vocab_size

    def is_encoded(self, run: RunDirectory) -> bool:
        """Return whether an earlier call made the tokenizer and encoded the texts."""
        return run.tokenizer.exists()

    def encode(  # noqa: B027
        self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None
    ) -> None:
        """Write the texts as tokens, unless they are held in memory."""


def prepare(
    objective: type[Objective],
    sources: Sources,
    run: RunDirectory,
    options: TrainOptions,
    config: GPTConfig | None = None,
    progress: Progress | None = None,
) -> tuple[Objective, Data]:
    """Return the objective and the data of a run; train its tokenizer if it has none yet.

    `config` is the config in run.toml. Raises `UserError` for data that cannot be trained on.
    """
    start = None
    if options.start is not None:
        start = sources.start or Pretrained(options.start, keep_head=objective.keeps_head)
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
        tokenizer = sources.tokenizer or _make_tokenizer(options, sources, config)
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
    setup = ModelSetup(config, tokenizer, start, options.freeze or "")
    trained, data = objective.make(sources, run, options, setup)
    if options.chooses or not (options.freeze or options.lora):
        return trained, data
    from tiedgpt.tune.freezing import count_trainable

    with torch.device("meta"):
        trainable = count_trainable(trained.build())
    return trained, replace(data, n_trained=trainable.moving, notes=[*data.notes, str(trainable)])


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


def _make_tokenizer(options: TrainOptions, sources: Sources, config: GPTConfig | None) -> Tokenizer:
    """Return the tokenizer of the options or of the model to start from, or train a new BPE."""
    source = options.start if options.tokenizer == "bpe" else options.tokenizer
    train, everything = sources.texts()
    if source == "char":
        tokenizer = Tokenizer.characters(everything)
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
