"""Texts of any size as token shards, in units that any number of processes encode.

    Preparation(data, ...)       the sources, how they are read, and how they are divided in units
    prepare_data(..., DIR, ...)  begins in DIR or goes on there
    encode_unit(DIR, 17)         makes DIR/000017/, with shards and counts, by one rename

    DIR/tokenizer/, prepare.json     written first: what a unit is, and how it is encoded
    DIR/000000/, DIR/000001/, ...    the units; one that is there is complete
    DIR/manifest.json                written last: sizes and sha256 of everything

A unit is some files, or a section of a large one, and depends on nothing but prepare.json: its
bytes are the same whoever encodes it, in whichever order, before or after a kill. A worker holds a
document in memory at a time, and never a unit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tiedgpt.data.corpus import PEEK, Corpus, FileCorpus, documents
from tiedgpt.data.encode import (
    MANIFEST,
    Counts,
    EncodedCorpus,
    open_encoded,
    require_both_sides,
    write_shards,
)
from tiedgpt.data.readers import (
    DECOMPRESSORS,
    DELIMITERS,
    PARQUET,
    Section,
    count_row_groups,
    ending,
    has_records,
)
from tiedgpt.data.shards import require_vocabulary
from tiedgpt.data.split import SIDES, TARGET, Side, Split, Threshold, digest, plan_split
from tiedgpt.errors import CheckFailedError, CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import (
    PREPARE,
    lock_file,
    read_json,
    reading,
    remove,
    remove_leftovers,
    replacing,
    write_json,
    writing,
)

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

TOKENIZER, UNIT, LOCK = "tokenizer", "unit.json", ".lock"
TOKENIZER_CHARACTERS = 200_000_000
"""A vocabulary is learned from this much text; more changes it little and takes long."""
VOCABULARY = 8192
"""The size of a vocabulary that is learned, unless another is asked for."""
LARGE = 64_000_000
"""Bytes of text from which it is split by a threshold, not exactly, and long texts are cut."""
UNITS, LEAST_UNIT, MOST_UNIT = 32, 1 << 16, 256 << 20
"""The number of units to aim at, and the least and most bytes of one."""
COMPRESSION = 4
"""The text of a compressed file is taken to be so many times larger."""
HELD_OUT = 64_000_000
"""Bytes of a large text that validate, if that is less than `TARGET` of it."""

Encode = Callable[[Path, Sequence[int]], Iterator[int]]
"""Encodes units of a directory by number, and yields the number of each as it is done."""


class Source(NamedTuple):
    """A file that is read; it is known by its first four fields."""

    name: str
    """Its path as the user wrote it; of a file of the hub `hf:OWNER/NAME@REVISION/FILE`."""
    size: int
    mtime_ns: int
    """When it was last changed; 0 for a file of the hub, which does not change."""
    side: Side
    is_named: bool
    path: str
    """Its absolute path, which may differ on another machine."""


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
        facts = [self.reading, *(source[:4] for source in self.sources)]
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
    before, after = ({(s.name, s.side): s[:4] for s in each} for each in (then, now))
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


def prepare_data(
    preparation: Preparation,
    directory: str | Path,
    tokenizer: Tokenizer | str = "bpe",
    *,
    vocab_size: int = VOCABULARY,
    encode: Encode | None = None,
    part: tuple[int, int] = (1, 1),
    progress: Callable[[int, int], None] | None = None,
) -> EncodedCorpus | None:
    """Encode files into a directory, or go on there; return what it holds once it is complete.

    The tokenizer is one, or "bpe" or "char" to make it of the text. `encode` is how units are
    encoded: `in_processes(4)`, `on_ray("auto")`; else here, one by one. With `part` (i, n) it
    is every n-th unit only, from the i-th: other processes encode the others, and the last to end
    completes the directory. `progress` is called with the bytes of files done, and in all.

    Raises:
        UserError: the directory was begun with other files or options, or is another's; or as
            `documents` raises.
        CorruptInputError: a file is damaged, or changed while it was read.
        NoRoomError: the disk is full; what is done stays.
    """
    directory, (index, n_parts) = Path(directory), part
    with _lock(directory, wait=n_parts > 1) as lock:
        if (directory / PREPARE).exists():
            plan = preparation.open_plan(directory, describe_tokenizer(tokenizer, vocab_size))
        else:
            plan = _begin(preparation, directory, tokenizer, vocab_size)
        if n_parts > 1:  # the units are independent; only beginning is not
            lock.close()
        own = range(index - 1, len(plan.units), n_parts)
        missing = [number for number in own if not is_done(directory, number)]
        total = sum(plan.units[number].n_bytes for number in own)
        done = total - sum(plan.units[number].n_bytes for number in missing)
        if progress is not None:
            progress(done, total)
        for number in (encode or encode_here)(directory, missing):
            done += plan.units[number].n_bytes
            if progress is not None:
                progress(done, total)
        if not all(is_done(directory, number) for number in range(len(plan.units))):
            return None
        preparation.require_same_sources()
        if n_parts == 1:
            return _finish(directory, plan, preparation)
    with _lock(directory, wait=True):  # several parts may have ended at once
        return _finish(directory, plan, preparation)


@contextmanager
def _lock(directory: Path, *, wait: bool) -> Iterator[IO[str]]:
    """Keep others out of a directory, which is made, while the block runs or the lock is open."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir() if ".tmp-" not in path.name}
        if PREPARE not in names and names - {LOCK, TOKENIZER}:
            raise UserError(f"{directory} is not empty", hint="give --out a new directory")
        lock = (directory / LOCK).open("a")
    with lock:
        if not lock_file(lock, wait=wait):
            raise UserError(f"{directory} is in use by another process", hint="wait for it")
        yield lock


def _begin(
    preparation: Preparation, directory: Path, tokenizer: Tokenizer | str, vocab_size: int
) -> Plan:
    """Write the tokenizer and the plan of a directory, and return the plan."""
    from tiedgpt.text import Tokenizer

    description = describe_tokenizer(tokenizer, vocab_size)
    if tokenizer == "char":
        tokenizer = Tokenizer.characters(preparation.texts())
    elif isinstance(tokenizer, str):
        tokenizer = Tokenizer.train(preparation.sample(TOKENIZER_CHARACTERS), vocab_size)
    require_vocabulary(len(tokenizer))
    remove(directory / TOKENIZER)  # what a kill left of it
    tokenizer.save_pretrained(directory / TOKENIZER)
    plan = replace(preparation.plan, tokenizer=description)
    write_json(directory / PREPARE, asdict(plan))
    return plan


def describe_tokenizer(tokenizer: Tokenizer | str, vocab_size: int = VOCABULARY) -> str:
    """Return what tells a tokenizer, or one that is to be made, from others."""
    if isinstance(tokenizer, str):
        return f"bpe of {vocab_size:,}" if tokenizer == "bpe" else tokenizer
    return f"that with the sha256 {hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]}"


def encode_here(directory: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Encode units of a directory in this process; yield the number of each that is done."""
    for number in numbers:
        encode_unit(directory, number)
        yield number


def encode_unit(directory: str | Path, number: int) -> None:
    """Encode one unit of a directory that was begun, unless that is done.

    Raises as `prepare_data`; then nothing of the unit is left.
    """
    place = _unit_path(Path(directory), number)
    if is_done(Path(directory), number):
        return
    for path in (place, *place.parent.glob(f".{place.name}.tmp-*")):
        remove(path)
    mtime_ns = os.stat(Path(directory, PREPARE)).st_mtime_ns
    plan, tokenizer = _read_plan_and_tokenizer(directory, mtime_ns)
    unit = plan.units[number]
    corpus = plan.corpus(unit)
    with replacing(place) as temporary:
        temporary.mkdir()
        counts = write_shards(plan.split(unit, corpus), tokenizer, temporary)
        record: dict[str, Any] = {side: asdict(counts[side]) for side in SIDES}
        record["files"] = {path.name: _identify(path) for path in sorted(temporary.iterdir())}
        record["remarks"] = corpus.remarks()
        write_json(temporary / UNIT, record)


@functools.lru_cache(1)
def _read_plan_and_tokenizer(directory: str | Path, mtime_ns: int) -> tuple[Plan, Tokenizer]:
    """Return what encoding needs; it is read once, unless the plan's file changes."""
    from tiedgpt.text import Tokenizer

    return Plan.read(Path(directory)), Tokenizer.from_pretrained(Path(directory) / TOKENIZER)


def _unit_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}"


def _identify(path: Path) -> tuple[int, str]:
    """Return a file's size and its sha256."""
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def is_done(directory: Path, number: int) -> bool:
    """Whether a unit of a directory is there, with files of the sizes that they were written in."""
    place = _unit_path(directory, number)
    try:
        files = read_json(place / UNIT)["files"]
        return all((place / name).stat().st_size == size for name, (size, _) in files.items())
    except (TiedGPTError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return False


def _finish(directory: Path, plan: Plan, preparation: Preparation) -> EncodedCorpus:
    """Write the manifest of a directory whose units are all there."""
    counts = dict.fromkeys(SIDES, Counts())
    tokenizer = sorted((directory / TOKENIZER).iterdir())
    files = {f"{TOKENIZER}/{path.name}": _identify(path) for path in tokenizer}
    remarks = FileCorpus("")
    for each in preparation.remarks:
        remarks.add_remarks(each)
    for number in range(len(plan.units)):
        place = _unit_path(directory, number)
        record = read_json(place / UNIT)
        counts = {side: counts[side] + Counts(**record[side]) for side in SIDES}
        files |= {f"{place.name}/{name}": identity for name, identity in record["files"].items()}
        remarks.add_remarks(record["remarks"])
    require_both_sides(counts)
    manifest: dict[str, Any] = {side: asdict(counts[side]) for side in SIDES}
    manifest |= {"reading": plan.reading, "tokenizer": plan.tokenizer}
    manifest["sources"] = [source[:4] for source in plan.sources]
    write_json(directory / MANIFEST, manifest | {"files": files, "notes": remarks.notes()})
    remove_leftovers(directory)
    return open_encoded(directory)


def require_complete(directory: Path) -> None:
    """Raise `UserError` for a directory that has no manifest yet."""
    if not (directory / MANIFEST).exists():
        raise UserError(f"{directory} is not complete", hint="`tiedgpt data prepare` goes on there")


def read_notes(directory: str | Path) -> list[str]:
    """Return what is worth telling of the texts in a complete directory."""
    return list(read_json(Path(directory) / MANIFEST)["notes"])


def verify_data(
    directory: str | Path, progress: Callable[[int, int], None] | None = None
) -> EncodedCorpus:
    """Read every file of a complete directory again, and compare it with the manifest.

    `progress` is called with the bytes done, and in all. Raises `CheckFailedError` where a file is
    missing or has changed, `UserError` where the directory is not complete.
    """
    directory = Path(directory)
    require_complete(directory)
    listed = read_json(directory / MANIFEST)["files"].items()
    files = {name: (size, sha256) for name, (size, sha256) in listed}
    wrong, done, total = [], 0, sum(size for size, _ in files.values())
    for name, identity in files.items():
        path = directory / name
        if not path.is_file() or _identify(path) != identity:
            wrong.append(name)
        done += identity[0]
        if progress is not None:
            progress(done, total)
    if wrong:
        units = sorted({name.partition("/")[0] for name in wrong})
        raise CheckFailedError(
            f"{directory}: {len(wrong):,} of {len(files):,} files are missing or have changed: "
            f"{', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)}",
            hint=f"delete {', '.join(units[:3])}{', ...' * (len(units) > 3)} in it, and give the "
            "command that prepared it again",
        )
    return open_encoded(directory)
