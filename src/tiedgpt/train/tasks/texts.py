"""Texts: documents to shards of tokens, and shards to rows.

Texts are held in memory (`TextSources`), or are encoded in parts by all cores if they are large
(`LargeSources`), or are a directory of `tiedgpt data prepare` (`PreparedSources`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from typing_extensions import override

from tiedgpt.data import (
    Batches,
    Corpus,
    Document,
    FileCorpus,
    Shards,
    documents,
    in_order,
    open_encoded,
    plan_preparation,
    plan_split,
    python_documentation,
)
from tiedgpt.data.encode import MANIFEST, encode_documents, note_split_characters
from tiedgpt.data.prepare import (
    LARGE_BYTES,
    TOKENIZER,
    TOKENIZER_CHARACTERS,
    is_begun,
    is_prepared,
    prepare_parts,
)
from tiedgpt.errors import UserError
from tiedgpt.files import PREPARED, format_bytes, format_count, remove
from tiedgpt.runtime import count_cores
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import END_OF_TEXT
from tiedgpt.train.plan.groups import READING, RunOptions
from tiedgpt.train.plan.values import Facts
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.tasks.rows import Data, Rows, Sources
from tiedgpt.weights.source import Source, open_tokenizer

PROMPT_TOKENS = 20_000
"""Number of held-out tokens in which prompts are looked for."""
OPENING_LINE = re.compile(r"(?<=\n\n)\S[^\n]{3,49}(?=\n[^\n])|^#+ [^\n]{2,50}$", re.MULTILINE)
"""A short line above a paragraph, or a heading of Markdown."""
WORD = re.compile(r"[^\W\d_]{3}")


def open_texts(options: RunOptions, tokenizer: Source | None) -> TextSources:
    """Open texts of any size, or a directory of `tiedgpt data prepare` with this tokenizer."""
    if is_prepared(options.data):
        return PreparedSources(options, tokenizer)
    if not options.data:
        return TextSources(options, python_documentation())
    corpus = documents(options.data, **options.reading)
    if corpus.estimate_bytes() >= LARGE_BYTES:
        return LargeSources(options)
    return TextSources(options, corpus)


class TextSources(Sources):
    """Texts that are held in memory; --val is read again if it is large."""

    def __init__(self, options: RunOptions, corpus: Corpus) -> None:
        self.is_fresh, validation = options.start is None, None
        self.files = [corpus] if isinstance(corpus, FileCorpus) else []
        if options.val is not None:
            files = documents([options.val], **options.reading)
            self.files.append(files)
            validation = files if files.estimate_bytes() >= LARGE_BYTES else [*files]
        self.split = plan_split([*corpus], validation)
        self.n_characters = self.split.characters

    @override
    def digest(self) -> str:
        total = hashlib.sha256()
        for document in chain(self.split.corpus, [Document("", "")], self.split.validation or ()):
            total.update(document.digest)
        return total.hexdigest()

    @override
    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        train = (document.text for side, document in self.split if side == "train")
        return train, (document.text for _, document in self.split)

    @override
    def encode(self, tokenizer: Tokenizer, directory: Path) -> Iterator[tuple[int, int]]:
        """Write the texts as shards of tokens, unless an earlier call did."""
        if (directory / MANIFEST).exists() and not (directory / PREPARED).exists():
            return
        remove(directory)  # of a larger text, for which this directory was begun
        yield from encode_documents(self.split, tokenizer, directory)

    def notes(self) -> list[str]:
        """Return notes on the texts, which have been read."""
        remarks = (note for files in self.files for note in files.remarks.notes())
        return [*self.split.notes(), *remarks]

    @override
    def rows(self, tokenizer: Tokenizer, directory: Path) -> TextRows:
        return TextRows(directory, tokenizer, self.notes(), is_fresh=self.is_fresh)


class LargeSources(TextSources):
    """Files that are never held in memory, and identified by name, size and date."""

    def __init__(self, options: RunOptions) -> None:
        self.is_fresh = options.start is None
        self.plan = plan_preparation(options.data, val=options.val, **options.reading)
        self.n_characters = self.plan.n_bytes

    @override
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.plan.facts("")).encode()).hexdigest()

    @override
    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return a sample of the training texts, and all texts."""
        return self.plan.sample(TOKENIZER_CHARACTERS), self.plan.texts()

    @override
    def encode(self, tokenizer: Tokenizer, directory: Path) -> Iterator[tuple[int, int]]:
        """Write the texts as shards of tokens, or continue an interrupted call."""
        if not is_begun(directory, self.plan, tokenizer):
            remove(directory)
        elif (directory / MANIFEST).exists():
            return
        yield from prepare_parts(self.plan, directory, tokenizer, workers=count_cores())

    @override
    def notes(self) -> list[str]:
        return []


class PreparedSources(LargeSources):
    """A directory of `tiedgpt data prepare`, with its own tokenizer."""

    tokenizer: Tokenizer

    def __init__(self, options: RunOptions, source: Source | None) -> None:
        if len(options.data) > 1:
            raise UserError(
                "a prepared directory is trained on alone",
                hint="prepare all data in one with `tiedgpt data prepare`",
            )
        self.path, self.is_fresh = Path(options.data[0]), options.start is None
        for name in ("val", *READING):
            if getattr(options, name) != getattr(RunOptions, name):
                raise UserError(f"was decided when {self.path} was prepared", option=name)
        open_encoded(self.path)
        self.tokenizer = Tokenizer.from_pretrained(self.path / TOKENIZER)
        if source is None:
            return
        tokenizers = self.tokenizer, open_tokenizer(source)
        ours, required = (json.loads(tokenizer.to_json())["model"] for tokenizer in tokenizers)
        if ours != required:
            raise UserError(
                f"{self.path} was prepared with another tokenizer than that of {source}",
                hint=f"prepare it with --tokenizer {source}",
            )

    @override
    def digest(self) -> str:
        """Return the sha256 of the manifest, which contains those of all shards."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()

    @override
    def encode(self, tokenizer: Tokenizer, directory: Path) -> Iterator[tuple[int, int]]:
        yield from ()  # the texts are encoded

    @override
    def rows(self, tokenizer: Tokenizer, directory: Path) -> TextRows:
        return TextRows(self.path, tokenizer, is_fresh=self.is_fresh)


class TextRows(Rows):
    """Shards in a directory, cut into rows of ids and targets, each (B, T)."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, notes: Iterable[str] = (), *, is_fresh: bool
    ) -> None:
        self.encoded, self.tokenizer = open_encoded(directory), tokenizer
        self.train = self.encoded.open_shards("train")
        self.validation = self.encoded.open_shards("val")
        self.notes = [*notes, *self.encoded.notes]
        if is_fresh:
            self.notes += note_split_characters(self.encoded, tokenizer)

    @override
    def facts(self, context: int) -> Facts:
        return Facts(
            unit="tokens",
            row_units=context,
            row_tokens=context,
            epoch_rows=max(1, -(-(len(self.train) - 1) // context)),
            held_out_rows=len(self.validation) / context,
            text_tokens=len(self.train),
            text_bytes=self.encoded.train.utf8_bytes,
        )

    @override
    def at(self, context: int) -> TextData:
        """Return the rows; an evaluation of some batches takes windows spread over the text."""
        self._require_enough(context)
        train, validation, counts = self.train, self.validation, self.encoded.train

        def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
            return Batches(train, batch_size=batch_size, n_positions=context, seed=seed).batch

        def held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
            at_most = None if n_batches is None else n_batches * batch_size
            return in_order(validation, batch_size=batch_size, n_positions=context, at_most=at_most)

        counts_val = self.encoded.val
        held_documents = f"{format_count(counts_val.documents, 'document')}, "
        description = {
            "text": f"{format_count(counts.documents, 'document')}, "
            f"{format_bytes(counts.utf8_bytes)}, {format_count(counts.tokens, 'token')}; "
            f"to validate on: {held_documents if counts.documents > 1 else ''}"
            f"{format_count(counts_val.tokens, 'token')}",
            "tokens": f"{self.tokenizer.kind} vocabulary of {len(self.tokenizer):,}, "
            f"{counts.utf8_bytes / max(1, len(train)):.2f} bytes a token",
        }
        return TextData(
            **vars(self.facts(context)),
            batches=batches,
            held_out=held_out,
            tokenizer=self.tokenizer,
            counts={"train_text": asdict(counts), "val_text": asdict(counts_val)},
            description=description,
            notes=self.notes,
            validation=validation,
        )

    def _require_enough(self, context: int) -> None:
        """Raise `UserError` for text shorter than the context."""
        tokens = len(self.train)
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


@dataclass(frozen=True, kw_only=True)
class TextData(Data):
    """A text in rows."""

    tokenizer: Tokenizer
    validation: Shards

    def find_prompts(self) -> tuple[str, str]:
        """Return two prompts from the validation text.

        They are short lines above a paragraph (a heading, a speaker, a signature), or else nothing
        and three words that follow each other, or the beginning of the first line.
        """
        ids = self.validation.read(0, min(PROMPT_TOKENS, len(self.validation))).tolist()
        text = self.tokenizer.decode(ids).replace(END_OF_TEXT, "\n\n")
        lines = dict.fromkeys(line for line in OPENING_LINE.findall(text) if WORD.search(line))
        if len(lines) > 1:
            return tuple(lines)[len(lines) // 3], tuple(lines)[2 * len(lines) // 3]
        words = re.search(r"(?<=\s)[^\W\d_]+( [^\W\d_]+){2}(?=\s)", text)
        return "", words[0] if words else text.strip().partition("\n")[0][:12]
