"""From sources of text to a tokenizer and token shards in the run's directory, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def prepare(
    run: RunDirectory, options: TrainOptions, progress: Callable[[int, int], None] | None = None
) -> tuple[Tokenizer, EncodedCorpus, list[str]]:
    """Return the run's tokenizer and shards, made now or by an earlier call, and notes."""
    if run.data.exists():
        if not run.tokenizer.is_dir():
            raise CorruptInputError(
                f"{run.tokenizer} is missing: without it the run cannot go on; train in another "
                "--out"
            )
        return Tokenizer.from_pretrained(run.tokenizer), open_encoded(run.data), []
    corpus: Corpus = (
        documents(options.data, text_field=options.text_field)
        if options.data
        else python_documentation()
    )
    validation = documents([options.val], text_field=options.text_field) if options.val else None
    split = plan_split(corpus, validation)
    notes = [
        f"left out {path}: not text"
        for part in (corpus, validation)
        if isinstance(part, FileCorpus)
        for path in part.skipped
    ]
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


def _at_most(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters, cutting the last."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
