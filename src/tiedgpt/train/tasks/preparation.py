"""Prepare a run: its tokenizer, the config of its model before a size is chosen, and its rows."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.data.prepare import TOKENIZER_CHARACTERS, is_prepared
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.distributed import Processes
from tiedgpt.train.plan.groups import AUTO, RunOptions
from tiedgpt.train.plan.options import TrainOptions, TuneOptions
from tiedgpt.train.plan.size import choose_vocabulary_size
from tiedgpt.train.plan.values import Facts
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.rows import Data, Rows, Sources
from tiedgpt.train.tasks.task import Pretrained, Task
from tiedgpt.tune.freezing import count_trainable
from tiedgpt.weights.source import open_tokenizer


@dataclass(frozen=True)
class Prepared:
    """A task with its encoded data, before or after a size is chosen."""

    task: Task
    config: GPTConfig
    """Config of the model; of a fresh one before its size is chosen."""
    rows: Rows
    n_trained: int | None = None
    """Number of trained parameters, or None for all."""
    notes: Sequence[str] = ()

    @property
    def facts(self) -> Facts:
        """The facts about the rows of this config."""
        facts = self.rows.facts(self._context(self.config))
        return replace(facts, n_trained=self.n_trained)

    def data(self, config: GPTConfig) -> Data:
        """Return the rows for a model of a config; `UserError` for too little data."""
        data = self.rows.at(self._context(config))
        return replace(data, n_trained=self.n_trained, notes=[*data.notes, *self.notes])

    def _context(self, config: GPTConfig) -> int:
        return self.task.options.context or config.n_positions


def prepare(
    task: Task,
    sources: Sources,
    run: RunDirectory,
    processes: Processes,
    config: GPTConfig | None = None,
) -> Generator[tuple[int, int], None, Prepared]:
    """Encode the data in a run's directory; yield the progress of `Sources.encode`.

    `config` is that of a run to resume. Raises `UserError` for data that cannot be trained on.
    """
    options, is_resumed = task.options, config is not None
    tokenizer = processes.main_first(_open_tokenizer, task, sources, run, is_resumed=is_resumed)
    config = config or _draft_config(options, task.start, sources, tokenizer)
    yield from processes.steps_main_first(sources.encode, tokenizer, run.data)
    rows = sources.rows(tokenizer, run.data)
    notes = [] if task.start is None else task.start.notes()
    notes += _note_vocabulary(options, len(tokenizer))
    rank = options.lora if isinstance(options, TuneOptions) else None
    if options.chooses:  # a short enough context, too
        return Prepared(task, config, rows, None, notes)
    data = rows.at(options.context or config.n_positions)
    if not (options.freeze or rank):
        return Prepared(task, config, rows, None, notes)
    with torch.device("meta"):
        trainable = count_trainable(task.build(config, data))
    if options.freeze and trainable.moving == trainable.total:
        raise UserError(
            f"--freeze {options.freeze}: {type(task).__name__} froze nothing",
            hint="call tiedgpt.tune.freeze(model, self.options.freeze) in its build",
        )
    return Prepared(task, config, rows, trainable.moving, [*notes, str(trainable)])


def _open_tokenizer(
    task: Task, sources: Sources, run: RunDirectory, *, is_resumed: bool = False
) -> Tokenizer:
    """Return the tokenizer in a run's directory; a new run makes and saves it."""
    if run.tokenizer.is_dir():
        return Tokenizer.from_pretrained(run.tokenizer)
    if is_resumed:
        raise CorruptInputError(
            f"{run.tokenizer} is missing: without it the run cannot resume",
            hint="train in another --out",
        )
    tokenizer = sources.tokenizer or _make_tokenizer(task, sources)
    tokenizer.save_pretrained(run.tokenizer)
    return tokenizer


def _make_tokenizer(task: Task, sources: Sources) -> Tokenizer:
    """Return the tokenizer of the options or of the model to start from, or train a new BPE."""
    options = task.options
    train, everything = sources.texts()
    if options.tokenizer_source == "char":
        return Tokenizer.characters(everything)
    if task.tokenizer_source is not None:
        return open_tokenizer(task.tokenizer_source)
    assert isinstance(options, TrainOptions)
    size = options.vocab_size or options.shape.vocab_size
    if sources.n_characters is not None and options.size == AUTO and not options.vocab_size:
        size = choose_vocabulary_size(sources.n_characters)
    return Tokenizer.train(_take(train, TOKENIZER_CHARACTERS), size)


def _take(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _draft_config(
    options: RunOptions, start: Pretrained | None, sources: Sources, tokenizer: Tokenizer
) -> GPTConfig:
    """Return the config of the model to start from, or of a fresh one before its size is chosen.

    Raises `UserError` for a tokenizer of another model, and a context or a rank that is too large.
    """
    if start is None:
        assert isinstance(options, TrainOptions)
        return options.model_config(
            vocab_size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
        )
    config = start.gpt.config
    if options.context is not None and options.context > config.n_positions:
        raise UserError(
            f"--context {options.context}: {options.start} has {config.n_positions} positions"
        )
    if sources.adds_tokens:
        config = replace(config, vocab_size=max(config.vocab_size, len(tokenizer)))
    elif sources.tokenizer is None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model {config.vocab_size:,}: "
            "they do not belong together",
            hint="give --tokenizer",
        )
    rank = options.lora if isinstance(options, TuneOptions) else None
    if (rank or 0) > config.n_embd:
        raise UserError(f"must be from 1 to the width {config.n_embd}, got {rank}", option="lora")
    dropout = options.start_dropout(memorizes=sources.memorizes)
    if dropout is None:
        return config
    # with dropout, attention loses its fast kernels
    return replace(config, embd_pdrop=dropout, attn_pdrop=0.0, resid_pdrop=dropout)


def _note_vocabulary(options: RunOptions, size: int) -> Iterator[str]:
    """Yield a note if a BPE that was trained has fewer tokens than the options ask for."""
    if not isinstance(options, TrainOptions) or options.tokenizer_source is not None:
        return
    requested = options.vocab_size or (0 if options.size == AUTO else options.shape.vocab_size)
    if size < requested and not is_prepared(options.data):
        yield f"the vocabulary has {size:,} tokens instead of {requested:,}: the text has no more"
