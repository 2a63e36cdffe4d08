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
from tiedgpt.text import Tokenizer
from tiedgpt.train.checkpoint import checkpoints, first_good, load_moments, load_weights, step_of
from tiedgpt.train.choice import vocabulary
from tiedgpt.train.objective import Pretrained, Task
from tiedgpt.train.objectives import LABELLED
from tiedgpt.train.objectives.example_set import ExampleSet, has_examples, read_example_set
from tiedgpt.train.objectives.labelled import Examples, Labelled, read_examples
from tiedgpt.train.objectives.language import LanguageModelling
from tiedgpt.train.objectives.tuned import Tuned, TunedExamples, TunedText
from tiedgpt.train.options import AUTO, TrainOptions
from tiedgpt.train.storage import RunDirectory, read_plan
from tiedgpt.train.tune_options import AnyOptions, TuneOptions
from tiedgpt.tune.freezing import moving

HELD_CHARACTERS = 100_000_000
"""Text of more characters is read again wherever it is needed."""
TOKENIZER_CHARACTERS = 200_000_000
"""A vocabulary is learned from this much text; more changes it little and takes long."""


class Forked:
    """The run that another one begins from, as it stands at its newest checkpoint.

    Raises `UserError` where there is no run with a checkpoint.
    """

    def __init__(self, source: str) -> None:
        self.run = RunDirectory(Path(source))
        self.tables = self.run.read_record()
        found = checkpoints(self.run.checkpoints)
        if not self.tables or not found:
            raise UserError(
                f"--fork {source}: no run with a checkpoint is there",
                hint="give the --out of a run, or a model's directory to --start",
            )
        self.config, self.plan = read_plan(self.tables)
        self.step = step_of(found[-1])
        if self.plan.untied(self.step):
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
    forked = Forked(options.fork)
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


def adapt_options(options: AnyOptions, sources: Sources) -> AnyOptions:
    """Return the options with what follows from the data: a few examples are learned by heart."""
    if isinstance(options, TuneOptions) and isinstance(sources, ExampleSet):
        return replace(options, examples=True, memorizes=not sources.holds_out)
    return options


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


class HeldCorpus:
    """A corpus that is read once: its documents are kept, where they are few enough for that."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._held: list[Document] | None = None

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents."""
        if self._held is not None:
            yield from self._held
            return
        held: list[Document] = []
        room = HELD_CHARACTERS
        for document in self.corpus:
            room -= len(document.text)
            if room >= 0:
                held.append(document)
            else:
                held.clear()
            yield document
        self._held = held if room >= 0 else None


@dataclass(frozen=True)
class Texts:
    """What a run is to be trained on, and validated on where that was named."""

    corpus: HeldCorpus
    validation: HeldCorpus | None

    def digest(self) -> str:
        """Return a sha256 of everything that is read, to know a changed text by."""
        whole = hashlib.sha256()
        for document in chain(self.corpus, [Document("", "")], self.validation or ()):
            whole.update(hashlib.sha256(document.text.encode()).digest())
        return whole.hexdigest()

    def notes(self) -> list[str]:
        """Return what is worth telling of the files: left out, or in another encoding."""
        held = (each.corpus for each in (self.corpus, self.validation) if each is not None)
        return [note for part in held if isinstance(part, FileCorpus) for note in part.notes()]


Sources = Texts | Examples | ExampleSet
"""What a run is to be trained on."""
Trained = LanguageModelling | Labelled | TunedExamples
"""The task of a run."""


def open_sources(options: AnyOptions) -> Sources:
    """Open what is to be trained on: examples, texts, or Python's documentation."""
    if isinstance(options, TuneOptions):
        if options.start is None:
            raise UserError("name the model to tune: --from MODEL")
        examples = has_examples(options)
        options.require_fit(examples=examples)
        if examples:
            return read_example_set(options)
    elif options.task != "lm":
        return read_examples(LABELLED[options.task], options.data, options.val)
    how = {"text_field": options.text_field, "encoding": options.encoding}
    return Texts(
        HeldCorpus(documents(options.data, **how) if options.data else python_documentation()),
        None if options.val is None else HeldCorpus(documents([options.val], **how)),
    )


def prepare(
    run: RunDirectory,
    options: AnyOptions,
    sources: Sources,
    config: GPTConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trained:
    """Return the run's task on the tokenizer and data made now or by an earlier call.

    `config` is the one that run.toml has. Raises `UserError` for what cannot be trained.
    """
    start = forked = None
    if options.start is not None:
        start = Pretrained(options.start, keep_head=options.task in ("lm", "choose"))
        start = sources.start if isinstance(sources, ExampleSet) else start
    if config is None and start is not None:
        config = _begun_with(start.gpt.config, options)
    elif config is None and options.fork is not None:
        forked = Forked(options.fork)
        config = _begun_with(forked.config, options)
        if isinstance(sources, Examples):
            forked.require_labels(sources.labels)
    if (run.data if isinstance(sources, Texts) else run.tokenizer).exists():
        if not run.tokenizer.is_dir():
            raise CorruptInputError(
                f"{run.tokenizer} is missing: without it the run cannot resume",
                hint="train in another --out",
            )
        tokenizer = Tokenizer.from_pretrained(run.tokenizer)
    elif isinstance(sources, ExampleSet):
        tokenizer = sources.tokenizer
        tokenizer.save_pretrained(run.tokenizer)
    else:
        own = options.start if forked is None else forked.run.tokenizer
        tokenizer = _tokenizer(run, options, sources, config, own, progress)
    if config is None:
        assert isinstance(options, TrainOptions)
        config = options.model_config(
            vocab_size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
        )
    made: dict[str, Any] = {"context": options.context, "start": start}
    task: Trained
    if isinstance(sources, ExampleSet):
        task = TunedExamples(sources, config)
    elif isinstance(sources, Texts):
        kind = TunedText if isinstance(options, TuneOptions) else LanguageModelling
        task = kind(run, config, tokenizer, **made)
        if not options.chooses:  # which looks for a context that is short enough
            task.require_enough()
        task.notes = sources.notes()
        task.sample_prompt = options.sample_prompt or ""
    else:
        task = LABELLED[options.task](sources, config, tokenizer, **made)
    task.frozen = options.freeze or ""
    if isinstance(task, Tuned) and isinstance(options, TuneOptions):
        task.choose(options)
    if (options.freeze or getattr(task, "rank", None)) and not options.chooses:
        with torch.device("meta"):
            moves = moving(task.build())
        task.trained = moves.moving
        task.notes.append(str(moves))
    if forked is not None:
        there = {"run": str(forked.run.path.resolve()), "step": forked.step}
        task.counted["fork"] = there | {"context": options.context}
    return task


def _begun_with(config: GPTConfig, options: AnyOptions) -> GPTConfig:
    """Return the config of the model to begin with, with the dropout that was asked for."""
    dropout = options.start_dropout if isinstance(options, TuneOptions) else options.dropout
    if options.context is not None and options.context > config.n_positions:
        raise UserError(
            f"--context {options.context}: {options.start or options.fork} has "
            f"{config.n_positions} positions"
        )
    if dropout is None:
        return config
    # Fine-tuning drops no attention weights: with dropout, attention loses its fast kernels.
    attention = 0.0 if isinstance(options, TuneOptions) else dropout
    return replace(config, embd_pdrop=dropout, attn_pdrop=attention, resid_pdrop=dropout)


def _tokenizer(
    run: RunDirectory,
    options: AnyOptions,
    sources: Texts | Examples,
    config: GPTConfig | None,
    own: str | Path | None,
    progress: Callable[[int, int], None] | None,
) -> Tokenizer:
    """Make and save the run's tokenizer, and encode texts into shards.

    It is the one asked for, that of the model to begin with (`own`), or a BPE trained here.
    """
    train: Iterable[str]
    whole: Iterable[str]
    vocabulary_size: int | None = None
    if isinstance(sources, Texts):
        split = plan_split(sources.corpus, sources.validation)
        train = (document.text for side, document in split if side == "train")
        whole = (document.text for _, document in split)
        if options.size == AUTO:
            vocabulary_size = vocabulary(split.characters)
    else:
        sides = (sources.train, sources.train + sources.held_out)
        train, whole = ((text for each in side for text in each.texts) for side in sides)
    source = own if options.tokenizer == "bpe" else options.tokenizer
    if source == "char":
        tokenizer = Tokenizer.characters(whole)
    elif source is None:
        assert isinstance(options, TrainOptions)
        size = options.vocab_size or vocabulary_size or options.shape.vocab_size
        tokenizer = Tokenizer.train(_at_most(train, TOKENIZER_CHARACTERS), size)
    else:
        tokenizer = Tokenizer.from_pretrained(source)
    if config is not None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model {config.vocab_size:,}: "
            "they do not belong together",
            hint="give --tokenizer",
        )
    tokenizer.save_pretrained(run.tokenizer)
    if isinstance(sources, Texts):
        encode_corpus(split, tokenizer, run.data, progress=progress)
    return tokenizer


def _at_most(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
