"""Large texts, encoded in parts by all cores, and directories of `tiedgpt data prepare`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tiedgpt.data import FileCorpus, plan_preparation, prepare_data
from tiedgpt.data.encode import MANIFEST
from tiedgpt.data.prepare import (
    LARGE_BYTES,
    TOKENIZER,
    TOKENIZER_CHARACTERS,
    estimate_bytes,
    is_begun,
    read_notes,
    require_complete,
)
from tiedgpt.errors import UserError
from tiedgpt.files import PREPARED, remove
from tiedgpt.runtime import count_cores
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Progress
from tiedgpt.train.objectives.language import TextSources
from tiedgpt.train.options import READING, TrainOptions
from tiedgpt.train.storage import RunDirectory


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
        return read_notes(self.shards(run))


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
        require_complete(self.path)
        self.tokenizer = Tokenizer.from_pretrained(self.path / TOKENIZER)
        source = options.start if options.tokenizer == "bpe" else options.tokenizer
        if source is None:
            return
        tokenizers = self.tokenizer, Tokenizer.from_pretrained(source)
        ours, theirs = (json.loads(tokenizer.to_json())["model"] for tokenizer in tokenizers)
        if ours != theirs:
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
