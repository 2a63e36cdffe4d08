"""Texts in units (`data/prepare.py`): those too large to hold, and those prepared beforehand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tiedgpt.data import FileCorpus, Preparation, count_cores, in_processes, prepare_data
from tiedgpt.data.encode import MANIFEST
from tiedgpt.data.preparation import LARGE, estimate_bytes
from tiedgpt.data.prepare import (
    TOKENIZER,
    TOKENIZER_CHARACTERS,
    describe_tokenizer,
    read_notes,
    require_complete,
)
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.files import PREPARE, remove
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Progress
from tiedgpt.train.objectives.language import TextSources
from tiedgpt.train.options import READING, TrainOptions
from tiedgpt.train.storage import RunDirectory
from tiedgpt.train.tune_options import AnyOptions


def is_prepared(data: Iterable[str]) -> bool:
    """Whether one of the sources is a directory of `tiedgpt data prepare`."""
    return any((Path(source) / PREPARE).is_file() for source in data)


def open_texts(options: AnyOptions) -> TextSources:
    """Open texts of any size, or a directory of `tiedgpt data prepare`."""
    if is_prepared(options.data):
        return PreparedSources(options)
    sources = TextSources(options)
    files = sources.corpus.corpus
    is_large = isinstance(files, FileCorpus) and estimate_bytes(files) >= LARGE
    return LargeSources(options) if is_large else sources


class LargeSources(TextSources):
    """Files that are never held: they are known by sizes and dates, and encoded by all cores."""

    def __init__(self, options: AnyOptions) -> None:
        self.preparation = Preparation(options.data, val=options.val, **options.reading)

    def digest(self) -> str:
        """Return a sha256 of the names, sizes and dates of the files."""
        return self.preparation.digest()

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return a sample of the texts that are trained on, and all of them."""
        return self.preparation.sample(TOKENIZER_CHARACTERS), self.preparation.texts()

    def count_characters(self) -> int:
        """Return how long the texts are, about."""
        return self.preparation.n_bytes

    def is_encoded(self, run: RunDirectory) -> bool:
        """Whether an earlier call encoded the texts."""
        if not (run.tokenizer.is_dir() and (run.data / MANIFEST).exists()):
            return False
        return self._has_begun(run, Tokenizer.from_pretrained(run.tokenizer))

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Write the texts as shards of tokens, or go on with it."""
        if not self._has_begun(run, tokenizer):
            remove(run.data)
        processes = in_processes(count_cores())
        prepare_data(self.preparation, run.data, tokenizer, encode=processes, progress=progress)

    def _has_begun(self, run: RunDirectory, tokenizer: Tokenizer) -> bool:
        try:
            self.preparation.open_plan(run.data, describe_tokenizer(tokenizer))
        except TiedGPTError:
            return False
        return True

    def notes(self, run: RunDirectory) -> list[str]:
        """Return what is worth telling of the texts."""
        return read_notes(self.shards(run))


class PreparedSources(LargeSources):
    """What `tiedgpt data prepare` wrote, with a tokenizer of its own."""

    tokenizer: Tokenizer

    def __init__(self, options: AnyOptions) -> None:
        if len(options.data) > 1:
            raise UserError(
                "a prepared directory is trained on alone",
                hint="prepare all data in one with `tiedgpt data prepare`",
            )
        self.path = Path(options.data[0])
        for name in ("val", *READING):
            if getattr(options, name) != getattr(TrainOptions, name):
                raise UserError(f"was decided when {self.path} was prepared", option=name)
        require_complete(self.path)
        self.tokenizer = Tokenizer.from_pretrained(self.path / TOKENIZER)
        theirs = options.start if options.tokenizer == "bpe" else options.tokenizer
        if theirs is not None:
            self._require_equal(theirs)

    def _require_equal(self, source: str) -> None:
        """Raise `UserError` unless the tokenizer of a source is the one that was used."""
        both = self.tokenizer, Tokenizer.from_pretrained(source)
        ours, theirs = (json.loads(each.to_json())["model"] for each in both)
        if ours != theirs:
            raise UserError(
                f"{self.path} was prepared with another tokenizer than that of {source}",
                hint=f"prepare it with --tokenizer {source}",
            )

    def digest(self) -> str:
        """Return a sha256 of the manifest, which has those of all shards."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()

    def shards(self, run: RunDirectory) -> Path:
        """Return the directory of the shards of tokens."""
        return self.path

    def is_encoded(self, run: RunDirectory) -> bool:
        """Whether an earlier call copied the tokenizer."""
        return run.tokenizer.exists()

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Do nothing: it is encoded."""
