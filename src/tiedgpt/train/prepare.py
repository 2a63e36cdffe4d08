"""From sources of text or of examples to a run's tokenizer, its data and its task, once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

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
from tiedgpt.train.exercises import EXERCISES
from tiedgpt.train.forking import Forked
from tiedgpt.train.labelled import Examples, Labelled, read_examples
from tiedgpt.train.language import LanguageModelling
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.pretrained import Pretrained
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.sizes import SIZES

TOKENIZER_CHARACTERS = 200_000_000
"""A vocabulary is learned from this much text; more changes it little and takes long."""


@dataclass(frozen=True)
class Texts:
    """What a run is to be trained on, and validated on where that was named."""

    corpus: Corpus
    validation: Corpus | None

    @classmethod
    def of(cls, options: TrainOptions) -> Texts:
        """Open the sources; without any, the documentation inside this Python."""
        if not options.data:
            corpus: Corpus = python_documentation()
        else:
            corpus = documents(options.data, text_field=options.text_field)
        if options.val is None:
            return cls(corpus, None)
        return cls(corpus, documents([options.val], text_field=options.text_field))

    def digest(self) -> str:
        """Return a sha256 of everything that is read, to know a changed text by."""
        whole = hashlib.sha256()
        for document in chain(self.corpus, [Document("", "")], self.validation or ()):
            whole.update(hashlib.sha256(document.text.encode()).digest())
        return whole.hexdigest()


@dataclass(frozen=True)
class Prepared:
    """A task that can be trained, what its data holds for run.toml, and what is worth telling."""

    task: LanguageModelling | Labelled
    counted: dict[str, dict[str, Any]]
    notes: list[str]


def open_sources(options: TrainOptions) -> Texts | Examples:
    """Open what is to be trained on: texts, or the examples of --task."""
    if options.task == "lm":
        return Texts.of(options)
    return read_examples(EXERCISES[options.task](), options.data, options.val)


def prepare(
    run: RunDirectory,
    options: TrainOptions,
    sources: Texts | Examples,
    config: GPTConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Return the run's task on the tokenizer and data made now or by an earlier call.

    `config` is the one that run.toml has. Raises `UserError` for what cannot be trained.
    """
    start = None
    if options.start is not None:
        start = Pretrained(options.start, keep_head=options.task in ("lm", "choose"))
    fork = None
    if options.fork is not None and config is None:
        fork = Forked.open(options.fork)
    if isinstance(sources, Texts):
        return _language(run, options, sources, config, start or fork, progress)
    if fork is not None:
        fork.require_labels(sources.labels)
    tokenizer = _kept_tokenizer(run) if run.tokenizer.is_dir() else None
    if tokenizer is None:
        exercise = EXERCISES[options.task]()
        sides = (sources.train, sources.train + sources.held_out)
        train, whole = (
            (t for line in side for t in exercise.texts(line.example)) for side in sides
        )
        tokenizer = _tokenizer(options, start or fork, train, whole)
        tokenizer.save_pretrained(run.tokenizer)
    config = config or _config(options, tokenizer, start or fork)
    task = Labelled(
        EXERCISES[options.task](), sources, config, tokenizer, context=options.context, start=start
    )
    labels = {"labels": list(sources.labels)} if sources.labels else {}
    counted: dict[str, dict[str, Any]] = {
        "train_examples": {"examples": len(task.train), **labels},
        "val_examples": {"examples": len(task.held_out)},
    }
    return Prepared(task, counted | (fork.table(options) if fork else {}), task.notes)


def _language(
    run: RunDirectory,
    options: TrainOptions,
    texts: Texts,
    config: GPTConfig | None,
    origin: Pretrained | Forked | None,
    progress: Callable[[int, int], None] | None,
) -> Prepared:
    """Encode texts into shards, once."""
    notes: list[str] = []
    if run.data.exists():
        tokenizer = _kept_tokenizer(run)
    else:
        split = plan_split(texts.corpus, texts.validation)
        notes = _left_out(texts)
        train = (document.text for side, document in split if side == "train")
        tokenizer = _tokenizer(options, origin, train, (document.text for _, document in split))
        tokenizer.save_pretrained(run.tokenizer)
        encode_corpus(split, tokenizer, run.data, progress=progress)
    config = config or _config(options, tokenizer, origin)
    start = origin if isinstance(origin, Pretrained) else None
    task = LanguageModelling(run, config, tokenizer, context=options.context, start=start)
    task.require_enough()
    sides = {"train_text": task.encoded.train, "val_text": task.encoded.val}
    counted: dict[str, dict[str, Any]] = {name: asdict(side) for name, side in sides.items()}
    if isinstance(origin, Forked):
        counted |= origin.table(options)
    return Prepared(task, counted, notes)


def _kept_tokenizer(run: RunDirectory) -> Tokenizer:
    if not run.tokenizer.is_dir():
        raise CorruptInputError(
            f"{run.tokenizer} is missing: without it the run cannot go on; train in another --out"
        )
    return Tokenizer.from_pretrained(run.tokenizer)


def _tokenizer(
    options: TrainOptions,
    origin: Pretrained | Forked | None,
    train: Iterable[str],
    whole: Iterable[str],
) -> Tokenizer:
    """Return the tokenizer asked for: trained, of characters, given, or the started model's."""
    if options.tokenizer != "bpe" and options.vocab_size is not None:
        raise UserError("--vocab-size is for a BPE that is trained; here the vocabulary is given")
    if isinstance(origin, Forked):
        return origin.tokenizer()
    if origin is not None:
        return origin.tokenizer(None if options.tokenizer == "bpe" else options.tokenizer)
    if options.tokenizer == "char":
        return Tokenizer.characters(whole)
    if options.tokenizer == "bpe":
        size = options.vocab_size or SIZES[options.size].vocab_size
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
    config = origin.config(options.dropout)
    if options.context is not None and options.context > config.n_positions:
        raise UserError(
            f"--context {options.context}: {options.start or options.fork} has "
            f"{config.n_positions} positions"
        )
    return config


def _left_out(texts: Texts) -> list[str]:
    parts = (texts.corpus, texts.validation)
    skipped = sorted(path for p in parts if isinstance(p, FileCorpus) for path in p.skipped)
    if not skipped:
        return []
    names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
    return [f"left out {len(skipped)} files that are no text: {names}"]


def _at_most(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
