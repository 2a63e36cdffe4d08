"""Texts of any size as the data of a run.

`open_texts` returns the texts of some options: held in memory, encoded in parts by all cores if
they are large, or a directory of `tiedgpt data prepare`. `open_text` returns their shards as rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tiedgpt.data import (
    Batches,
    Corpus,
    Counts,
    Document,
    FileCorpus,
    Shards,
    Split,
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
    estimate_bytes,
    is_begun,
)
from tiedgpt.errors import UserError
from tiedgpt.files import PREPARED, remove
from tiedgpt.runtime import count_cores
from tiedgpt.text import Tokenizer
from tiedgpt.train.dataset import Data, Progress, Sources
from tiedgpt.train.objective import Arrays
from tiedgpt.train.options import AUTO, READING, TrainOptions, format_count
from tiedgpt.train.planning import choose_vocabulary_size
from tiedgpt.train.storage import RunDirectory

CACHED_CHARACTERS = 100_000_000
"""A text of more characters is read again wherever it is needed."""


def is_prepared(data: Iterable[str]) -> bool:
    """Return whether one of the sources is a directory of `tiedgpt data prepare`."""
    return any((Path(source) / PREPARED).is_file() for source in data)


def open_texts(options: TrainOptions) -> TextSources:
    """Open texts of any size, or a directory of `tiedgpt data prepare`."""
    if is_prepared(options.data):
        return PreparedSources(options)
    sources = TextSources(options)
    files = sources.corpus.corpus
    is_large = isinstance(files, FileCorpus) and estimate_bytes(files) >= LARGE_BYTES
    return LargeSources(options) if is_large else sources


class CachedCorpus:
    """A corpus that is read once, because its documents are kept if they are few enough."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._documents: list[Document] | None = None

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents."""
        if self._documents is not None:
            yield from self._documents
            return
        documents: list[Document] = []
        room = CACHED_CHARACTERS
        for document in self.corpus:
            room -= len(document.text)
            if room >= 0:
                documents.append(document)
            else:
                documents.clear()
            yield document
        self._documents = documents if room >= 0 else None


class TextSources(Sources):
    """The texts of the options, or Python's documentation."""

    def __init__(self, options: TrainOptions) -> None:
        how, data = options.reading, options.data
        self.corpus = CachedCorpus(documents(data, **how) if data else python_documentation())
        validation = None if options.val is None else documents([options.val], **how)
        self.validation = None if validation is None else CachedCorpus(validation)

    def digest(self) -> str:
        """Return a sha256 of all documents, which detects a changed text."""
        total = hashlib.sha256()
        for document in chain(self.corpus, [Document("", "")], self.validation or ()):
            total.update(document.digest)
        return total.hexdigest()

    @functools.cached_property
    def split(self) -> Split:
        """The split into documents to train on and to validate on."""
        return plan_split(self.corpus, self.validation)

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the training texts, and all texts."""
        train = (document.text for side, document in self.split if side == "train")
        return train, (document.text for _, document in self.split)

    def count_characters(self) -> int:
        """Return the approximate number of characters."""
        return self.split.characters

    def vocabulary_size(self, options: TrainOptions) -> int:
        """Return the size of the vocabulary to train on the texts."""
        if options.size == AUTO and options.vocab_size is None:
            return choose_vocabulary_size(self.count_characters())
        return super().vocabulary_size(options)

    def shards(self, run: RunDirectory) -> Path:
        """Return the directory of the shards of tokens."""
        return run.data

    def is_encoded(self, run: RunDirectory) -> bool:
        """Whether an earlier call encoded the texts."""
        return (run.data / MANIFEST).exists() and not (run.data / PREPARED).exists()

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Write the texts as shards of tokens."""
        remove(run.data)  # of a larger text, for which this directory was begun
        encode_corpus(self.split, tokenizer, run.data, progress=progress)

    def notes(self, run: RunDirectory) -> list[str]:
        """Return notes on the texts."""
        corpora = (cached.corpus for cached in (self.corpus, self.validation) if cached)
        files = [corpus for corpus in corpora if isinstance(corpus, FileCorpus)]
        return [*self.split.notes(), *(note for corpus in files for note in corpus.remarks.notes())]


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
                f"the training text has {tokens:,} tokens and the context is {context}",
                hint=f"use --context below {tokens} or more text",
            )
        if len(self.validation) < 2:
            raise UserError(
                f"the validation text has {len(self.validation)} tokens, too few to predict one",
                hint="use more text, or give --val",
            )

    def find_words(self, tokenizer: Tokenizer) -> str:
        """Return three words that follow each other in the validation text, or its beginning."""
        text = tokenizer.decode(self.validation.read(0, min(2000, len(self.validation))).tolist())
        words = re.search(r"(?<=\s)[^\W\d_]+( [^\W\d_]+){2}(?=\s)", text)
        return words[0] if words else " ".join(text.split())[:12]


def open_text(
    directory: Path, tokenizer: Tokenizer, context: int, notes: Iterable[str] = ()
) -> TextData:
    """Return the shards in a directory as data: rows of ids and targets, each (B, T).

    An evaluation of some batches takes windows spread evenly over the validation text.
    """
    encoded = open_encoded(directory)
    train, validation = encoded.open_shards("train"), encoded.open_shards("val")
    description = {
        "text": _describe_text(encoded.train, encoded.val),
        "tokens": f"{tokenizer.kind} vocabulary of {len(tokenizer):,}, "
        f"{encoded.train.utf8_bytes / max(1, len(train)):.2f} bytes a token",
    }
    return TextData(
        **_cut_rows(train, validation, context),
        unit="tokens",
        text_tokens=len(train),
        text_bytes=encoded.train.utf8_bytes,
        counts={"train_text": asdict(encoded.train), "val_text": asdict(encoded.val)},
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


def _describe_text(train: Counts, val: Counts) -> str:
    of = f"{format_count(val.documents, 'document')}, " if train.documents > 1 else ""
    return (
        f"{format_count(train.documents, 'document')}, {train.utf8_bytes / 1e6:.2f} MB, "
        f"{train.tokens:,} tokens; to validate on: {of}{val.tokens:,} tokens"
    )


class LargeSources(TextSources):
    """Files that are never held in memory, and identified by name, size and date."""

    def __init__(self, options: TrainOptions) -> None:
        self.plan = plan_preparation(options.data, val=options.val, **options.reading)

    def digest(self) -> str:
        """Return a sha256 of the names, sizes and dates of the files."""
        return hashlib.sha256(json.dumps(self.plan.facts("")).encode()).hexdigest()

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return a sample of the training texts, and all texts."""
        return self.plan.sample(TOKENIZER_CHARACTERS), self.plan.texts()

    def count_characters(self) -> int:
        """Return the estimated length of the texts."""
        return self.plan.n_bytes

    def is_encoded(self, run: RunDirectory) -> bool:
        """Return whether an earlier call encoded the texts."""
        return (
            run.tokenizer.is_dir()
            and (run.data / MANIFEST).exists()
            and is_begun(run.data, self.plan, Tokenizer.from_pretrained(run.tokenizer))
        )

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Write the texts as shards of tokens, or continue an interrupted call."""
        if not is_begun(run.data, self.plan, tokenizer):
            remove(run.data)

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

    def is_encoded(self, run: RunDirectory) -> bool:
        """Return whether an earlier call copied the tokenizer."""
        return run.tokenizer.exists()

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Do nothing: the texts are encoded."""
