"""What a run begins with: its texts or examples, its tokenizer, and the model it starts from.

`prepare` makes the run's tokenizer, data and task once. A model to `--start` from gives its shape,
its tokenizer and its weights. A run to `--fork` gives the optimizer's state as well, for each
parameter that goes by the same rule as there: the steps, the schedule of the rate, the order of the
data and the random stream begin anew. Both are only read, and no longer needed once the run has its
own first checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import (
    Corpus,
    Document,
    FileCorpus,
    documents,
    encode_corpus,
    plan_split,
    python_documentation,
)
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads.head import load_body
from tiedgpt.text import Tokenizer
from tiedgpt.train.checkpoint import checkpoints, first_good, load_moments, load_weights, step_of
from tiedgpt.train.choice import vocabulary
from tiedgpt.train.options import AUTO, FRESH_ONLY, TrainOptions, flag
from tiedgpt.train.plan import Plan, recorded
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.task import Task
from tiedgpt.train.tasks import LABELLED
from tiedgpt.train.tasks.labelled import Examples, Labelled, read_examples
from tiedgpt.train.tasks.language import LanguageModelling

TOKENIZER_CHARACTERS = 200_000_000
"""A vocabulary is learned from this much text; more changes it little and takes long."""


@dataclass
class Pretrained:
    """The GPT at a SOURCE; a head on it, other than that over the vocabulary, stays there."""

    source: str
    keep_head: bool
    """Whether a head of its own over the vocabulary is taken along."""
    _gpt: GPT | None = None

    @property
    def gpt(self) -> GPT:
        """The model, in fp32, read once."""
        if self._gpt is None:
            self._gpt = load_body(self.source, dtype=torch.float32, keep_head=self.keep_head)
        return self._gpt

    def config(self) -> GPTConfig:
        """Return its config."""
        return self.gpt.config

    def tokenizer(self, source: str | None = None) -> Tokenizer:
        """Return its tokenizer, or that at `source`; they must belong together."""
        tokenizer = Tokenizer.from_pretrained(source or self.source)
        if len(tokenizer) > self.gpt.config.vocab_size:
            raise UserError(
                f"the tokenizer has {len(tokenizer):,} tokens and {self.source} "
                f"{self.gpt.config.vocab_size:,}: they do not belong together; give --tokenizer"
            )
        return tokenizer

    def put_into(self, gpt: GPT) -> None:
        """Copy its weights into a model of its shape, and let go of them."""
        theirs, ours = self.gpt.state_dict(), gpt.state_dict()
        if {n: t.shape for n, t in theirs.items()} != {n: t.shape for n, t in ours.items()}:
            raise UserError(
                f"{self.source} is another model than when this run began: give another --out"
            )
        gpt.load_state_dict(theirs)
        self._gpt = None


@dataclass(frozen=True)
class Forked:
    """The run that another one begins from."""

    run: RunDirectory
    tables: dict[str, Any]
    """Its run.toml."""
    its_config: GPTConfig
    its_plan: Plan

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

    def step(self) -> int:
        """Return the step of its newest checkpoint."""
        return step_of(checkpoints(self.run.checkpoints)[-1])

    def resolve(self, options: TrainOptions) -> TrainOptions:
        """Return the options with the run's own shape and numbers where none were given.

        Raises `UserError` for options that ask for another model than the run has.
        """
        there = {"task": "lm", **self.tables.get("options", {})}
        if options.task != there["task"]:
            raise UserError(
                f"--fork {self.run.path} is of --task {there['task']}: to put another head on its "
                f"body, give --start {self.run.model}"
            )
        for name in FRESH_ONLY:
            given, default = getattr(options, name), getattr(TrainOptions, name)
            if given not in (default, there.get(name, default)):
                raise UserError(
                    f"{flag(name)} {given} is for a fresh model: {self.run.path} has its own"
                )
        context = options.context or there.get("context")
        _require_positions(context, self.its_config, self.run.path)
        own_rule = options.optimizer == "auto"
        return replace(
            options,
            size=there.get("size", TrainOptions.size),
            width=None,
            vocab_size=None,
            tokenizer=TrainOptions.tokenizer,
            context=context,
            lr=options.lr or self.its_plan.lr,
            batch_size=options.batch_size or self.its_plan.batch_size,
            optimizer=self.its_plan.optimizer if own_rule else options.optimizer,
        )

    def table(self, options: TrainOptions) -> dict[str, dict[str, Any]]:
        """Return the table of run.toml that tells of it; `options` are the resolved ones."""
        there = {"run": str(self.run.path.resolve()), "step": self.step()}
        return {"fork": there | {"context": options.context}}

    def config(self) -> GPTConfig:
        """Return its newest model's config."""
        if self.its_plan.untied(self.step()):
            return replace(self.its_config, tie_word_embeddings=False)
        return self.its_config

    def tokenizer(self, source: str | None = None) -> Tokenizer:
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
    """Return the options, of a fork resolved by the run it begins from or by its own run.toml."""
    if options.fork is None:
        return options
    if tables:
        return replace(options, context=tables.get("fork", {}).get("context", options.context))
    return Forked.open(options.fork).resolve(options)


def begin_fork(
    directory: Path, task: Task, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[str]:
    """Put the newest good checkpoint of another run into the model and its optimizers; say so.

    The directory is only read. Moments of a parameter that goes by another rule now are left out.
    """

    def load(path: Path) -> int:
        load_weights(path, task, model)
        return load_moments(path, model, optimizers)

    path, kept, damaged = first_good(directory, load)
    total = sum(1 for _ in model.parameters())
    state = f"the optimizer's state of {kept} of {total} parameters"
    return [*damaged.values(), f"begins with {path}: its weights, and {state}"]


@dataclass(frozen=True)
class Texts:
    """What a run is to be trained on, and validated on where that was named."""

    corpus: Corpus
    validation: Corpus | None

    def digest(self) -> str:
        """Return a sha256 of everything that is read, to know a changed text by."""
        whole = hashlib.sha256()
        for document in chain(self.corpus, [Document("", "")], self.validation or ()):
            whole.update(hashlib.sha256(document.text.encode()).digest())
        return whole.hexdigest()

    def notes(self) -> list[str]:
        """Return what is worth telling of the files: left out, or in another encoding."""
        parts = [part for part in (self.corpus, self.validation) if isinstance(part, FileCorpus)]
        skipped = sorted(path for part in parts for path in part.skipped)
        guessed = [pair for part in parts for pair in part.guessed.items()]
        notes = [f"{name} is read as {how}; --encoding names another" for name, how in guessed]
        if skipped:
            names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
            notes.append(f"left out {len(skipped)} files that are not UTF-8: {names}")
        return notes


def open_sources(options: TrainOptions) -> Texts | Examples:
    """Open what is to be trained on: the examples of --task, texts, or Python's documentation."""
    if options.task != "lm":
        return read_examples(LABELLED[options.task], options.data, options.val)
    how = {"text_field": options.text_field, "encoding": options.encoding}
    return Texts(
        documents(options.data, **how) if options.data else python_documentation(),
        None if options.val is None else documents([options.val], **how),
    )


def prepare(
    run: RunDirectory,
    options: TrainOptions,
    sources: Texts | Examples,
    config: GPTConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModelling | Labelled:
    """Return the run's task on the tokenizer and data made now or by an earlier call.

    `config` is the one that run.toml has. Raises `UserError` for what cannot be trained.
    """
    origin: Pretrained | Forked | None = None
    if options.start is not None:
        origin = Pretrained(options.start, keep_head=options.task in ("lm", "choose"))
    elif options.fork is not None and config is None:
        origin = Forked.open(options.fork)
    start = origin if isinstance(origin, Pretrained) else None
    if isinstance(sources, Examples) and isinstance(origin, Forked):
        origin.require_labels(sources.labels)
    if (run.data if isinstance(sources, Texts) else run.tokenizer).exists():
        if not run.tokenizer.is_dir():
            raise CorruptInputError(
                f"{run.tokenizer} is missing: without it the run cannot go on; train in another "
                "--out"
            )
        tokenizer = Tokenizer.from_pretrained(run.tokenizer)
    elif isinstance(sources, Texts):
        tokenizer = _encode(run, options, sources, origin, progress)
    else:
        sides = (sources.train, sources.train + sources.held_out)
        train, whole = ((text for each in side for text in each.texts) for side in sides)
        tokenizer = _tokenizer(options, origin, train, whole)
        tokenizer.save_pretrained(run.tokenizer)
    config = config or _config(options, tokenizer, origin)
    made: dict[str, Any] = {"context": options.context, "start": start}
    task: LanguageModelling | Labelled
    if isinstance(sources, Texts):
        task = LanguageModelling(run, config, tokenizer, **made)
        if not options.chooses:  # which looks for a context that is short enough
            task.require_enough()
        task.notes = sources.notes()
        task.sample_prompt = options.sample_prompt or ""
    else:
        task = LABELLED[options.task](sources, config, tokenizer, **made)
    task.frozen = options.freeze or ""
    if isinstance(origin, Forked):
        task.counted |= origin.table(options)
    return task


def _encode(
    run: RunDirectory,
    options: TrainOptions,
    texts: Texts,
    origin: Pretrained | Forked | None,
    progress: Callable[[int, int], None] | None,
) -> Tokenizer:
    """Encode texts into shards; return the tokenizer."""
    split = plan_split(texts.corpus, texts.validation)
    train = (document.text for side, document in split if side == "train")
    fresh = origin is None and options.tokenizer == "bpe"
    if fresh and options.size == AUTO and options.vocab_size is None:
        options = replace(options, vocab_size=vocabulary(split.characters))
    tokenizer = _tokenizer(options, origin, train, (document.text for _, document in split))
    tokenizer.save_pretrained(run.tokenizer)
    encode_corpus(split, tokenizer, run.data, progress=progress)
    return tokenizer


def _tokenizer(
    options: TrainOptions,
    origin: Pretrained | Forked | None,
    train: Iterable[str],
    whole: Iterable[str],
) -> Tokenizer:
    """Return the tokenizer asked for: trained, of characters, given, or the started model's."""
    if options.tokenizer != "bpe" and options.vocab_size is not None:
        raise UserError("--vocab-size is for a BPE that is trained; here the vocabulary is given")
    if origin is not None:
        return origin.tokenizer(None if options.tokenizer == "bpe" else options.tokenizer)
    if options.tokenizer == "char":
        return Tokenizer.characters(whole)
    if options.tokenizer == "bpe":
        size = options.vocab_size or options.shape.vocab_size
        return Tokenizer.train(_at_most(iter(train), TOKENIZER_CHARACTERS), size)
    return Tokenizer.from_pretrained(options.tokenizer)


def _config(
    options: TrainOptions, tokenizer: Tokenizer, origin: Pretrained | Forked | None
) -> GPTConfig:
    """Return the config of the size that was asked for, or of the model to start from."""
    if origin is None:
        return options.model_config(
            vocab_size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
        )
    config, dropout = origin.config(), options.dropout
    _require_positions(options.context, config, options.start or options.fork)
    if dropout is None:
        return config
    return replace(config, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout)


def _require_positions(context: int | None, config: GPTConfig, source: object) -> None:
    if context is not None and context > config.n_positions:
        raise UserError(f"--context {context}: {source} has {config.n_positions} positions")


def _at_most(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
