"""From sources of text to a tokenizer and token shards in the run's directory, once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiedgpt.data import (
    Corpus,
    EncodedCorpus,
    FileCorpus,
    documents,
    encode_corpus,
    open_encoded,
    plan_split,
    python_documentation,
)
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.options import SIZES, TrainOptions
from tiedgpt.train.run_directory import RunDirectory

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
        for document in (*self.corpus, "", *(self.validation or ())):
            text = document if isinstance(document, str) else document.text
            whole.update(hashlib.sha256(text.encode()).digest())
        return whole.hexdigest()


def prepare(
    run: RunDirectory,
    options: TrainOptions,
    texts: Texts,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tokenizer, EncodedCorpus, list[str]]:
    """Return the run's tokenizer and shards, made now or by an earlier call, and notes."""
    if run.data.exists():
        if not run.tokenizer.is_dir():
            raise CorruptInputError(
                f"{run.tokenizer} is missing: without it the run cannot go on; train in another "
                "--out"
            )
        return Tokenizer.from_pretrained(run.tokenizer), open_encoded(run.data), []
    split = plan_split(texts.corpus, texts.validation)
    notes = _left_out(texts)
    if options.tokenizer != "bpe" and options.vocab_size is not None:
        raise UserError("--vocab-size is for a BPE that is trained; here the vocabulary is given")
    if options.tokenizer == "char":
        tokenizer = Tokenizer.characters(document.text for _, document in split)
    elif options.tokenizer == "bpe":
        size = options.vocab_size or SIZES[options.size].vocab_size
        train = (document.text for side, document in split if side == "train")
        tokenizer = Tokenizer.train(_at_most(train, TOKENIZER_CHARACTERS), size)
    else:
        tokenizer = Tokenizer.from_pretrained(options.tokenizer)
    tokenizer.save_pretrained(run.tokenizer)
    encoded = encode_corpus(split, tokenizer, run.data, progress=progress)
    return tokenizer, encoded, notes


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
