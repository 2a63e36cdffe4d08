"""The data of a run: documents read once, a tokenizer, and rows to train on.

    sources = objective_class.open(options)  # reads the documents
    objective, data = prepare(objective_class, sources, directory, options)

`prepare` makes the tokenizer and encodes the sources in the run's directory. `Data` holds the rows
and the numbers about them that a plan depends on.

Texts are held in memory (`TextSources`), or are encoded in parts by all cores if they are large
(`LargeSources`), or are a directory of `tiedgpt data prepare`. `open_text` returns their shards as
rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.data import (
    Batches,
    Corpus,
    Document,
    FileCorpus,
    Shards,
    documents,
    encode_corpus,
    in_order,
    open_encoded,
    plan_preparation,
    plan_split,
    prepare_data,
    python_documentation,
)
from tiedgpt.data.encode import MANIFEST
from tiedgpt.data.prepare import (
    LARGE_BYTES,
    TOKENIZER,
    TOKENIZER_CHARACTERS,
    is_begun,
)
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import PREPARED, format_bytes, format_count, remove
from tiedgpt.runtime import count_cores
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import END_OF_TEXT
from tiedgpt.train.objective import Arrays, ModelSetup, Objective, Pretrained, check_result
from tiedgpt.train.options import AUTO, READING, TUNE_DROPOUT, TrainOptions
from tiedgpt.train.planning import Facts, choose_vocabulary_size
from tiedgpt.train.storage import RunDirectory

Progress = Callable[[int, int], None]
"""Function of the number of encoded characters and their total."""
PROMPT_TOKENS = 20_000
"""Number of held-out tokens in which prompts are looked for."""
OPENING_LINE = re.compile(r"(?<=\n\n)\S[^\n]{3,49}(?=\n[^\n])|^#+ [^\n]{2,50}$", re.MULTILINE)
"""A short line above a paragraph, or a heading of Markdown."""
WORD = re.compile(r"[^\W\d_]{3}")


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
    n_characters: int | None = None
    """Approximate length of texts, which decides the size of their vocabulary."""
    memorizes: bool = False
    """Whether the examples are so few that they are memorized, because none is held out."""

    @abstractmethod
    def digest(self) -> str:
        """Return a sha256 of all data, which detects changed data."""

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the training texts, and all texts, to train a tokenizer on."""
        return (), ()

    def encode(  # noqa: B027
        self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None
    ) -> None:
        """Write the texts as tokens, unless they are in memory or an earlier call wrote them."""


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
    start, is_resumed = None, config is not None
    if options.start is not None:
        start = sources.start or Pretrained(options.start, keep_head=objective.keeps_head)
        config = config or _configure_start(start.gpt.config, options, sources.memorizes)
    if run.tokenizer.is_dir():
        tokenizer = Tokenizer.from_pretrained(run.tokenizer)
    elif is_resumed:
        raise CorruptInputError(
            f"{run.tokenizer} is missing: without it the run cannot resume",
            hint="train in another --out",
        )
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
    pair: Any = objective.make(sources, run, options, setup)
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    is_valid = is_pair and isinstance(pair[0], Objective) and isinstance(pair[1], Data)
    check_result(objective, "make", pair, "an objective and its Data", is_valid)
    trained, data = pair
    start_notes = [] if start is None else start.notes()
    vocabulary_notes = _note_vocabulary(options, len(tokenizer))
    data = replace(data, notes=[*data.notes, *start_notes, *vocabulary_notes])
    if options.chooses or not (options.freeze or options.lora):
        return trained, data
    from tiedgpt.tune.freezing import count_trainable

    with torch.device("meta"):
        trainable = count_trainable(trained.build())
    if options.objective and options.freeze and trainable.moving == trainable.total:
        raise UserError(
            f"--freeze {options.freeze}: {options.objective} froze nothing",
            hint="call tiedgpt.tune.freeze(model, self.frozen) in its build",
        )
    return trained, replace(data, n_trained=trainable.moving, notes=[*data.notes, str(trainable)])


def _configure_start(config: GPTConfig, options: TrainOptions, memorizes: bool) -> GPTConfig:
    """Return the config of the model to begin with, with the dropout that was asked for."""
    if options.context is not None and options.context > config.n_positions:
        raise UserError(
            f"--context {options.context}: {options.start} has {config.n_positions} positions"
        )
    dropout = options.dropout
    if dropout is None and options.recipe == "tune":
        dropout = 0.0 if memorizes else TUNE_DROPOUT
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
        size = options.vocab_size or options.shape.vocab_size
        if sources.n_characters is not None and options.size == AUTO and not options.vocab_size:
            size = choose_vocabulary_size(sources.n_characters)
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


def _note_vocabulary(options: TrainOptions, size: int) -> Iterator[str]:
    """Yield a note if a BPE that was trained has fewer tokens than the options ask for."""
    is_trained = options.start is None and options.tokenizer == "bpe"
    requested = options.vocab_size or (0 if options.size == AUTO else options.shape.vocab_size)
    if is_trained and size < requested and not is_prepared(options.data):
        yield f"the vocabulary has {size:,} tokens instead of {requested:,}: the text has no more"


def _take(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


# Texts


def is_prepared(data: Iterable[str]) -> bool:
    """Return whether one of the sources is a directory of `tiedgpt data prepare`."""
    return any((Path(source) / PREPARED).is_file() for source in data)


def open_texts(options: TrainOptions) -> TextSources:
    """Open texts of any size, or a directory of `tiedgpt data prepare`."""
    if is_prepared(options.data):
        return PreparedSources(options)
    if not options.data:
        return TextSources(options, python_documentation())
    corpus = documents(options.data, **options.reading)
    if corpus.estimate_bytes() >= LARGE_BYTES:
        return LargeSources(options)
    return TextSources(options, corpus)


class TextSources(Sources):
    """Texts that are held in memory; --val is read again if it is large."""

    def __init__(self, options: TrainOptions, corpus: Corpus) -> None:
        validation: Corpus | None = None
        self.files = [corpus] if isinstance(corpus, FileCorpus) else []
        if options.val is not None:
            files = documents([options.val], **options.reading)
            self.files.append(files)
            validation = files if files.estimate_bytes() >= LARGE_BYTES else [*files]
        self.split = plan_split([*corpus], validation)
        self.n_characters = self.split.characters

    def digest(self) -> str:
        """Return a sha256 of all documents, which detects a changed text."""
        total = hashlib.sha256()
        for document in chain(self.split.corpus, [Document("", "")], self.split.validation or ()):
            total.update(document.digest)
        return total.hexdigest()

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the training texts, and all texts."""
        train = (document.text for side, document in self.split if side == "train")
        return train, (document.text for _, document in self.split)

    def shards(self, run: RunDirectory) -> Path:
        """Return the directory of the shards of tokens."""
        return run.data

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Write the texts as shards of tokens, unless an earlier call did."""
        if (run.data / MANIFEST).exists() and not (run.data / PREPARED).exists():
            return
        remove(run.data)  # of a larger text, for which this directory was begun
        encode_corpus(self.split, tokenizer, run.data, progress=progress)

    def notes(self, run: RunDirectory) -> list[str]:
        """Return notes on the texts."""
        remarks = (note for files in self.files for note in files.remarks.notes())
        return [*self.split.notes(), *remarks, *open_encoded(self.shards(run)).notes]


@dataclass(frozen=True, kw_only=True)
class TextData(Data):
    """A text in shards, cut into rows of a context."""

    train: Shards
    validation: Shards

    def with_context(self, context: int) -> TextData:
        """Return the same text in rows of another context; `UserError` if it is too short."""
        data = replace(self, **_cut_rows(self.train, self.validation, context))
        data.require_enough()
        return data

    def require_enough(self) -> None:
        """Raise `UserError` for text shorter than the context."""
        tokens, context = len(self.train), self.row_tokens
        if tokens < context + 1:
            raise UserError(
                f"the training text has {format_count(tokens, 'token')} for a context of {context}",
                hint=f"use --context below {tokens} or more text",
            )
        if len(self.validation) < 2:
            raise UserError(
                f"the validation text has {format_count(len(self.validation), 'token')}, too few "
                "to predict one",
                hint="use more text, or give --val",
            )

    def find_prompts(self, tokenizer: Tokenizer) -> tuple[str, str]:
        """Return two prompts from the validation text.

        They are short lines above a paragraph (a heading, a speaker, a signature), or else nothing
        and three words that follow each other, or the beginning of the first line.
        """
        ids = self.validation.read(0, min(PROMPT_TOKENS, len(self.validation))).tolist()
        text = tokenizer.decode(ids).replace(END_OF_TEXT, "\n\n")
        lines = dict.fromkeys(line for line in OPENING_LINE.findall(text) if WORD.search(line))
        if len(lines) > 1:
            return tuple(lines)[len(lines) // 3], tuple(lines)[2 * len(lines) // 3]
        words = re.search(r"(?<=\s)[^\W\d_]+( [^\W\d_]+){2}(?=\s)", text)
        return "", words[0] if words else text.strip().partition("\n")[0][:12]


def open_text(
    directory: Path, tokenizer: Tokenizer, context: int, notes: Iterable[str] = ()
) -> TextData:
    """Return the shards in a directory as data: rows of ids and targets, each (B, T).

    An evaluation of some batches takes windows spread evenly over the validation text.
    """
    encoded = open_encoded(directory)
    train, validation = encoded.open_shards("train"), encoded.open_shards("val")
    counts, n_held_out = encoded.train, encoded.val.documents
    held_out = f"{format_count(n_held_out, 'document')}, " if counts.documents > 1 else ""
    description = {
        "text": f"{format_count(counts.documents, 'document')}, {format_bytes(counts.utf8_bytes)}, "
        f"{format_count(counts.tokens, 'token')}; to validate on: {held_out}"
        f"{format_count(encoded.val.tokens, 'token')}",
        "tokens": f"{tokenizer.kind} vocabulary of {len(tokenizer):,}, "
        f"{counts.utf8_bytes / max(1, len(train)):.2f} bytes a token",
    }
    return TextData(
        **_cut_rows(train, validation, context),
        unit="tokens",
        text_tokens=len(train),
        text_bytes=counts.utf8_bytes,
        counts={"train_text": asdict(counts), "val_text": asdict(encoded.val)},
        description=description,
        notes=[*notes],
        train=train,
        validation=validation,
    )


def _cut_rows(train: Shards, validation: Shards, context: int) -> dict[str, Any]:
    """Return the fields of a `TextData` that depend on the context."""

    def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
        return Batches(train, batch_size=batch_size, n_positions=context, seed=seed).batch

    def held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
        at_most = None if n_batches is None else n_batches * batch_size
        return in_order(validation, batch_size=batch_size, n_positions=context, at_most=at_most)

    return {
        "batches": batches,
        "held_out": held_out,
        "row_units": context,
        "row_tokens": context,
        "epoch_rows": max(1, -(-(len(train) - 1) // context)),
        "held_out_rows": len(validation) / context,
    }


class LargeSources(TextSources):
    """Files that are never held in memory, and identified by name, size and date."""

    def __init__(self, options: TrainOptions) -> None:
        self.plan = plan_preparation(options.data, val=options.val, **options.reading)
        self.n_characters = self.plan.n_bytes

    def digest(self) -> str:
        """Return a sha256 of the names, sizes and dates of the files."""
        return hashlib.sha256(json.dumps(self.plan.facts("")).encode()).hexdigest()

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return a sample of the training texts, and all texts."""
        return self.plan.sample(TOKENIZER_CHARACTERS), self.plan.texts()

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Write the texts as shards of tokens, or continue an interrupted call."""
        if not is_begun(run.data, self.plan, tokenizer):
            remove(run.data)
        elif (run.data / MANIFEST).exists():
            return

        def show(_: str, done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)

        prepare_data(self.plan, run.data, tokenizer, workers=count_cores(), progress=show)

    def notes(self, run: RunDirectory) -> list[str]:
        """Return notes on the texts."""
        return [*open_encoded(self.shards(run)).notes]


class PreparedSources(LargeSources):
    """A directory of `tiedgpt data prepare`, with its own tokenizer."""

    tokenizer: Tokenizer

    def __init__(self, options: TrainOptions) -> None:
        if len(options.data) > 1:
            raise UserError(
                "a prepared directory is trained on alone",
                hint="prepare all data in one with `tiedgpt data prepare`",
            )
        self.path = Path(options.data[0])
        for name in ("val", *READING):
            if getattr(options, name) != getattr(TrainOptions, name):
                raise UserError(f"was decided when {self.path} was prepared", option=name)
        open_encoded(self.path)
        self.tokenizer = Tokenizer.from_pretrained(self.path / TOKENIZER)
        source = options.start if options.tokenizer == "bpe" else options.tokenizer
        if source is None:
            return
        tokenizers = self.tokenizer, Tokenizer.from_pretrained(source)
        ours, required = (json.loads(tokenizer.to_json())["model"] for tokenizer in tokenizers)
        if ours != required:
            raise UserError(
                f"{self.path} was prepared with another tokenizer than that of {source}",
                hint=f"prepare it with --tokenizer {source}",
            )

    def digest(self) -> str:
        """Return the sha256 of the manifest, which contains those of all shards."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()

    def shards(self, run: RunDirectory) -> Path:
        """Return the directory of the shards of tokens."""
        return self.path

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Do nothing: the texts are encoded."""
