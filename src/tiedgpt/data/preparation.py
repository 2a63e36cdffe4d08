"""What is prepared, and how it is divided: the files, their sides, and units of them.

    Preparation(data, ...)   the sources, and how they are read
    Preparation.plan         its Plan: the units, and what is held out; kept in prepare.json

A unit is some files, or a section of a large one, and depends on nothing but the plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from tiedgpt.data.corpus import PEEK, Corpus, FileCorpus, documents
from tiedgpt.data.readers import (
    DECOMPRESSORS,
    DELIMITERS,
    PARQUET,
    Section,
    count_row_groups,
    ending,
    has_records,
)
from tiedgpt.data.split import TARGET, Side, Split, Threshold, digest, plan_split
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import PREPARE, read_json, reading

LARGE = 64_000_000
"""Bytes of text from which it is split by a threshold, not exactly, and long texts are cut."""
UNITS, LEAST_UNIT, MOST_UNIT = 32, 1 << 16, 256 << 20
"""The number of units to aim at, and the least and most bytes of one."""
COMPRESSION = 4
"""The text of a compressed file is taken to be so many times larger."""
HELD_OUT = 64_000_000
"""Bytes of a large text that validate, if that is less than `TARGET` of it."""


class Source(NamedTuple):
    """A file that is read."""

    name: str
    """Its path as the user wrote it; of a file of the hub `hf:OWNER/NAME@REVISION/FILE`."""
    size: int
    mtime_ns: int
    """When it was last changed; 0 for a file of the hub, which does not change."""
    side: Side
    is_named: bool
    path: str
    """Its absolute path, which may differ on another machine."""

    @property
    def identity(self) -> tuple[str, int, int, Side]:
        """By what it is known again."""
        return self.name, self.size, self.mtime_ns, self.side


class Unit(NamedTuple):
    """Consecutive sources of one side, or a section of one."""

    first: int
    stop: int
    section: Section | None
    n_bytes: int
    """Their size on the disk, about."""


class Preparation:
    """The files that are to be prepared, and how they are read: the options of `documents`.

    Raises `UserError` where a source is missing, or is no file.
    """

    def __init__(
        self,
        data: Sequence[str],
        *,
        val: str | None = None,
        text_field: str = "text",
        encoding: str = "auto",
        keep_end_of_text: bool = False,
    ) -> None:
        self.reading: dict[str, Any] = {
            "text_field": text_field,
            "encoding": encoding,
            "keep_end_of_text": keep_end_of_text,
        }
        self.names: dict[Side, Sequence[str]] = {"train": data}
        if val is not None:
            self.names["val"] = [val]
        self.corpora = {side: documents(n, **self.reading) for side, n in self.names.items()}
        self.sources = [s for side, c in self.corpora.items() for s in _list_sources(c, side)]
        self.n_bytes = estimate_bytes(self.corpora["train"])
        self.is_large = self.n_bytes >= LARGE
        for corpus in self.corpora.values():
            corpus.in_parts = self.is_large
        self.remarks = [corpus.remarks() for corpus in self.corpora.values()]
        """On the names of the files; those on their contents are the units'."""

    def digest(self) -> str:
        """Return a sha256 of the names, sizes and dates of the sources, and how they are read."""
        facts = [self.reading, *(source.identity for source in self.sources)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def require_same_sources(self) -> None:
        """Raise `CorruptInputError` if files changed, came or went since this was made."""
        pins = dict(pin for corpus in self.corpora.values() for pin in corpus.pins)
        now = []
        for side, names in self.names.items():
            now += _list_sources(documents([pins.get(n, n) for n in names], **self.reading), side)
        if problem := _find_change(self.sources, now):
            raise CorruptInputError(
                f"{problem} while it was read", hint="prepare the data in a new directory"
            )

    @functools.cached_property
    def plan(self) -> Plan:
        """How it is divided in units and split. Texts of less than `LARGE` are read for that."""
        corpus, validation, share = self.corpora["train"], self.corpora.get("val"), None
        is_cut, held_out = False, frozenset[bytes]()
        if not self.is_large:
            split = plan_split(corpus, validation)
            assert isinstance(split.held_out, frozenset)
            is_cut, held_out = split.is_cut, split.held_out
        elif validation is not None:
            held_out = frozenset(digest(document.text) for document in validation)
        else:
            share = min(TARGET, HELD_OUT / self.n_bytes)
        return Plan(
            reading=self.reading,
            in_parts=self.is_large,
            is_cut=is_cut,
            has_validation=validation is not None,
            share=share,
            held_out=sorted(each.hex() for each in held_out),
            sources=self.sources,
            units=[*_divide(self.sources, corpus, self.is_large)],
        )

    def open_plan(self, directory: Path, tokenizer: str) -> Plan:
        """Return the plan of a directory; `UserError` where it was begun with something else."""
        plan = Plan.read(directory)
        then = {**plan.reading, "tokenizer": plan.tokenizer}
        for name, now in {**self.reading, "tokenizer": tokenizer}.items():
            if then.get(name) != now:
                raise UserError(
                    f"is {now}, and {directory} was begun with {then.get(name)}",
                    hint="give another --out",
                    option=name,
                )
        if problem := _find_change(plan.sources, self.sources):
            raise UserError(
                f"{problem} since {directory} was begun", hint="prepare the data in a new directory"
            )
        return plan

    def sample(self, characters: int) -> Iterator[str]:
        """Yield texts that are trained on, from all units, of so many characters at most."""
        units = [unit for unit in self.plan.units if self.sources[unit.first].side == "train"]
        for unit in units:
            room = characters // len(units)
            for side, document in self.plan.split(unit, self.plan.corpus(unit)):
                if side == "train":
                    yield document.text[:room]
                    room -= len(document.text)
                if room <= 0:
                    break

    def texts(self) -> Iterator[str]:
        """Yield all texts, of both sides."""
        for unit in self.plan.units:
            yield from (document.text for document in self.plan.corpus(unit))


@dataclass(frozen=True)
class Plan:
    """What prepare.json says."""

    reading: dict[str, Any]
    in_parts: bool
    is_cut: bool
    has_validation: bool
    share: float | None
    """The share of all digests that is held out, the lowest ones; None where `held_out` says."""
    held_out: list[str]
    """The digests that are held out, in hexadecimal, where there is no share."""
    sources: list[Source]
    units: list[Unit]
    tokenizer: str = ""
    """What `describe_tokenizer` said of the tokenizer that was asked for."""

    @classmethod
    def read(cls, directory: Path) -> Plan:
        """Return the plan of a directory; `CorruptInputError` where it is damaged."""
        values = read_json(directory / PREPARE)
        with reading(directory / PREPARE, "plan of prepared data"):
            values["sources"] = [Source(*each) for each in values["sources"]]
            values["units"] = [Unit(*each) for each in values["units"]]
            return cls(**values)

    def corpus(self, unit: Unit) -> FileCorpus:
        """Return the documents of a unit."""
        sources = self.sources[unit.first : unit.stop]
        return FileCorpus(
            **self.reading,
            paths={source.path: source.is_named for source in sources},
            names={source.path: source.name for source in sources},
            in_parts=self.in_parts,
            section=unit.section,
            may_be_blank=True,
        )

    def split(self, unit: Unit, corpus: Corpus) -> Split:
        """Return the documents of a unit with their sides."""
        validation: Corpus | None = () if self.has_validation else None
        if self.sources[unit.first].side == "val":
            corpus, validation = (), corpus
        return Split(corpus, validation, self._held_out, is_cut=self.is_cut, characters=0)

    @functools.cached_property
    def _held_out(self) -> frozenset[bytes] | Threshold:
        if self.share is not None:
            return Threshold(self.share)
        return frozenset(map(bytes.fromhex, self.held_out))


def estimate_bytes(corpus: FileCorpus) -> int:
    """Return about how many bytes of text files hold; pipes and standard input count as none."""
    return sum(
        os.path.getsize(path) * (COMPRESSION if _is_compressed(path) else 1)
        for path in corpus.paths
        if os.path.isfile(path)
    )


def _is_compressed(path: str) -> bool:
    return PurePath(path).suffix.lower() in (*DECOMPRESSORS, PARQUET)


def _list_sources(corpus: FileCorpus, side: Side) -> list[Source]:
    """Return the files of a corpus; `UserError` for what is no file, or no text by its name."""
    sources = []
    for path, is_named in corpus.paths.items():
        name = corpus.name(path)
        if not os.path.isfile(path):
            raise UserError(f"{name} is no file", hint="write what is to be prepared to one")
        if has_records(path) or corpus.is_text(path, name):
            status = os.stat(path)
            mtime_ns = 0 if path in corpus.names else status.st_mtime_ns
            place = os.path.abspath(path)
            sources.append(Source(name, status.st_size, mtime_ns, side, is_named, place))
    return sources


def _find_change(then: Sequence[Source], now: Sequence[Source]) -> str:
    """Return in words what differs between two lists of sources; "" for nothing."""
    before, after = ({(s.name, s.side): s.identity for s in each} for each in (then, now))
    for key in [*before, *after]:
        if before.get(key) != after.get(key):
            how = "is new" if key not in before else "changed" if key in after else "is gone"
            return f"{key[0]} {how}"
    return "" if [*before] == [*after] else "the order of the files changed"


def _divide(sources: Sequence[Source], corpus: FileCorpus, is_large: bool) -> Iterator[Unit]:
    """Yield the units of the sources, in order."""
    total = sum(source.size for source in sources)
    target = min(MOST_UNIT, max(LEAST_UNIT, total // UNITS))
    first, n_bytes = 0, 0
    for number, source in enumerate(sources):
        sections = _list_sections(source, corpus, target, is_large)
        ends = sections or n_bytes + source.size > target or sources[first].side != source.side
        if number > first and ends:
            yield Unit(first, number, None, n_bytes)
            first, n_bytes = number, 0
        for section in sections:
            yield Unit(number, number + 1, section, source.size // len(sections))
            first = number + 1
        n_bytes += 0 if sections else source.size
    if first < len(sources):
        yield Unit(first, len(sources), None, n_bytes)


def _list_sections(
    source: Source, corpus: FileCorpus, target: int, is_large: bool
) -> list[Section]:
    """Return the sections that a file is divided in; none if it is read whole."""
    path, whole, n_sections = source.path, source.size, -(-source.size // target)
    is_stream = PurePath(path).suffix.lower() in DECOMPRESSORS or ending(path) in DELIMITERS
    if n_sections < 2 or is_stream:
        return []
    with open(path, "rb") as file:
        if ending(path) == PARQUET:
            whole = count_row_groups(file, source.name)
        elif not has_records(path) and not (is_large and corpus.has_lines(file.read(PEEK))):
            return []
    n_sections = min(n_sections, whole)
    cuts = [number * whole // n_sections for number in range(n_sections + 1)]
    return [*pairwise(cuts)] if n_sections > 1 else []
